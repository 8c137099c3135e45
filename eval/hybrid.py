"""What predictions bring to models with a running state, at the sizes of real ones.

    python -m eval hybrid --shape qwen3.5-0.8b --layers 8 --dtype bfloat16

The model has random weights, since only its times count. A random text is forced upon all methods
alike, as `python -m eval predict` does, and the predictions have its token in a given share of the
places, and another one elsewhere. All methods take turns, text by text, after one text that
doesn't count. Drafts that were wrong cost steps twice where a state can't be taken back: the tokens
accepted before them are read again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.methods.method import Method, SelfSpecMethod
from eval.methods.names import STOCK
from eval.methods.registry import new_method
from eval.models.shapes import known
from eval.options import add_drafting, check_at_least, checked_knobs
from eval.report.table import Table
from eval.runs.environment import told, where
from eval.runs.forced import Counts, Task, measure
from selfspec import SelfSpec, attach

_NUM_PROMPT = 32
_TYPES = {"a": "full_attention", "c": "conv", "l": "linear_attention"}
# Without the parts that see pictures. `layer_types` has a letter of the above for each layer.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": "llla" * 6,
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16},
        **{"num_attention_heads": 8, "num_key_value_heads": 2},
        "tie_word_embeddings": True,
        "vocab_size": 248_320,
    },
    "lfm2-700m": {
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "hidden_size": 1536,
        "intermediate_size": 10_240,
        "layer_types": "ccaccaccacacacac",
        **{"num_attention_heads": 24, "num_key_value_heads": 8},
        "vocab_size": 65_536,
    },
}


def run(options: argparse.Namespace) -> int:
    """Measures all shares beside stock, and prints a table and the JSON line."""
    check_at_least(options, 1, "tokens", "texts", "layers")
    knobs, model = checked_knobs(options), new_model(options)
    tasks = [new_task(n, options, model.config.vocab_size) for n in range(options.texts + 1)]
    ours = {name_of(share): SelfSpec(**knobs) for share in options.shares}
    methods: list[Method] = [new_method(STOCK)]
    methods += [SelfSpecMethod(name, spec) for name, spec in ours.items()]
    found = _told(measure(model, tasks[1:], methods, warm_up=tasks[:1]), ours)
    print(_table(found).markdown())
    print(json.dumps(told("hybrid", options, **where(model), methods=found)))
    return 0


def name_of(share: int) -> str:
    return f"{share} % right"


def new_model(options: argparse.Namespace) -> Any:
    """A random model of the named shape, with the first of its layers."""
    shape = dict(SHAPES[known("shape", options.shape, SHAPES)])
    types = [_TYPES[letter] for letter in shape["layer_types"][: options.layers]]
    shape |= {"layer_types": types, "num_hidden_layers": len(types)}
    shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config, dtype = AutoConfig.for_model(**shape), getattr(torch, options.dtype)
    return attach(AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(options.device))


def new_task(number: int, options: argparse.Namespace, vocab_size: int) -> Task:
    """A random prompt and text, and what is predicted of the text for each share."""
    draw = random.Random(number)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(1, vocab_size) for _ in range(length)]

    prompt_ids, answer_ids = tokens(_NUM_PROMPT), tokens(options.tokens)
    predictions = {}
    for share in options.shares:
        wrong = iter(tokens(options.tokens))
        predictions[name_of(share)] = [
            token if 100 * draw.random() < share else next(wrong) for token in answer_ids
        ]
    return Task("text", prompt_ids, answer_ids, predictions)


def _told(counts: Counts, ours: Mapping[str, SelfSpec]) -> dict[str, dict[str, Any]]:
    """Steps and seconds of all counted texts; widths are of the uncounted one too."""
    summed = {name: by_task["text"] for name, by_task in counts.items()}
    stock_seconds = sum(each.seconds for each in summed[STOCK])
    found: dict[str, dict[str, Any]] = {}
    for name, all_counted in summed.items():
        tokens, steps, seconds = map(sum, zip(*all_counted, strict=True))
        found[name] = {"tokens": tokens, "steps": steps, "seconds": round(seconds, 3)}
        found[name] |= {"speed_up": round(stock_seconds / seconds, 3), "nodes": 1.0, "pending": 0.0}
        if name in ours:
            stats = ours[name].total_stats
            pending = stats.num_read_again / max(stats.num_steps, 1)
            found[name] |= {"nodes": round(stats.nodes_per_step, 2), "pending": round(pending, 2)}
            found[name] |= {"forward": stats.forward, "reason": stats.disabled_reason}
    return found


def _table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = {
        "predictions": "{name}",
        "tokens": "{tokens}",
        "steps": "{steps}",
        "nodes a step": "{nodes:.2f}",
        "read again a step": "{pending:.2f}",
        "seconds": "{seconds:.2f}",
        "speed-up": "{speed_up:.2f}x",
    }
    rows = [{**each, "name": name} for name, each in found.items()]
    return Table.of("Running states", columns, rows, "Seconds are of whole calls, prompts and all.")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="qwen3.5-0.8b", help=f"{', '.join(SHAPES)}; default: %(default)s")
    add("--layers", type=int, metavar="N", help="the first N; default: all")
    add("--shares", type=int, nargs="+", default=[0, 50, 80, 95], metavar="PERCENT")
    add("--tokens", type=int, default=96, metavar="N", help="of a text; default: %(default)s")
    add("--texts", type=int, default=4, metavar="N", help="default: %(default)s")
    add("--dtype", default="float32", help="float32, bfloat16 or float16; default: %(default)s")
    add("--device", default="cpu", help="default: %(default)s")
    add("--threads", type=int, metavar="N", help="of the CPU; default: torch's own number")
    add_drafting(parser)

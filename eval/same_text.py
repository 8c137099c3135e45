"""How often drafting changes a greedy text in half precision, and how near a tie it was.

    python -m eval.same_text --model PATH --questions question.jsonl --dtypes bfloat16 float16

A forward of another width rounds differently. So does stock's own, from one batch size to the
next: beside the texts on which selfspec parts from stock, those are counted on which stock parts
from itself, once the same prompt stands left-padded in a batch of two. Where a text parts, the
gap is how far stock's own scores put the other token behind stock's, in logits and in ulps: steps
of the dtype at that score. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from eval.bench_table import markdown
from eval.grow import DTYPES
from eval.interleaved import first_difference
from eval.prompts import (
    Prompts,
    add_model_options,
    add_prompt_options,
    load_model,
    load_prompts,
)
from eval.setup import exit_status, machine, parsed_knobs, quieten, sampling, versions
from selfspec import SelfSpec

__all__ = ["Parting", "Texts", "beside_a_longer_one", "compare", "main", "parting", "ulp"]

_DTYPES = ("bfloat16", "float16", "float32")
_NUM_PADS = 8  # in front of a prompt that stands beside a longer one


class Parting(NamedTuple):
    """Where a text leaves stock's, and how far behind stock's token the other one was there."""

    at: int  # the number of the new token, from 0
    gap: float  # in logits; 0 is a tie
    ulps: float


class Texts(NamedTuple):
    """What became of one prompt's texts; None where they are stock's."""

    drafted: Parting | None
    batched: Parting | None


def main(argv: Sequence[str] | None = None) -> int:
    """Compares in each dtype, and prints a table and the JSON line."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    quieten()
    prompts = load_prompts(options)
    told = {}
    for dtype in dict.fromkeys(options.dtypes):
        model = load_model(options.model, dtype=dtype, device=options.device, shape=options.shape)
        told[dtype] = _measured(model, prompts, options)
        print(f"{dtype}: {len(prompts)} texts compared", flush=True)
    print(_table(told))
    print(json.dumps({**_settings(options, len(prompts), model), "dtypes": told}))
    return 0


def compare(
    model: Any, prompts: Prompts, spec: SelfSpec, *, max_new_tokens: int
) -> Iterator[Texts]:
    """For each prompt: is selfspec's text stock's, and is stock's own, in a batch of two."""
    pad = _pad_token(model)
    for _, ids in prompts:
        ids = ids.to(model.device)
        alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        asked = {"max_new_tokens": max_new_tokens, "pad_token_id": pad, **sampling(0)}
        stock = model.generate(**alone, **asked, return_dict_in_generate=True, output_scores=True)
        drafted = model.generate(**alone, **asked, custom_generate=spec)
        pair = beside_a_longer_one(ids, pad)
        batched = model.generate(**pair, **asked)[0, pair["input_ids"].shape[1] :]
        batched = batched[: len(stock.scores)]  # padded behind its end while the other row goes on
        yield Texts(
            parting(stock, drafted[0, ids.shape[1] :].tolist(), model.dtype),
            parting(stock, batched.tolist(), model.dtype),
        )


def parting(stock: Any, new_ids: Sequence[int], dtype: torch.dtype) -> Parting | None:
    """Where new ids leave stock's, as its output of one row with scores has it; None: nowhere.

    The gap is infinite where one text ends and the other does not: no rounding does that.
    """
    expected = stock.sequences[0, -len(stock.scores) :].tolist()
    at = first_difference(new_ids, expected)
    if at is None:
        return None
    if at == min(len(new_ids), len(expected)):
        return Parting(at, math.inf, math.inf)
    scores = stock.scores[at][0]
    best = float(scores[expected[at]])
    gap = best - float(scores[new_ids[at]])
    return Parting(at, gap, gap / ulp(best, dtype))


def beside_a_longer_one(ids: torch.Tensor, pad_token_id: int) -> dict[str, torch.Tensor]:
    """A batch of the prompt (1, L), left-padded, and of a text that is longer by as much."""
    num_pads = min(_NUM_PADS, ids.shape[1])
    pads = torch.full_like(ids[:, :num_pads], pad_token_id)
    short, long = torch.cat([pads, ids], dim=1), torch.cat([ids[:, :num_pads], ids], dim=1)
    input_ids = torch.cat([short, long])
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :num_pads] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def ulp(value: float, dtype: torch.dtype) -> float:
    """The step from a number of this size to the next one."""
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(max(abs(value), info.tiny))) * info.eps


def _pad_token(model: Any) -> int:
    """Any token will do: the mask hides it."""
    pad = model.generation_config.pad_token_id
    return 0 if pad is None else pad


def _measured(model: Any, prompts: Prompts, options: argparse.Namespace) -> dict[str, Any]:
    spec = SelfSpec(**{"max_nodes": options.max_nodes, **parsed_knobs(options.knob)})
    texts = list(compare(model, prompts, spec, max_new_tokens=options.max_new_tokens))
    told: dict[str, Any] = {
        "num_prompts": len(texts),
        "selfspec": _counted([text.drafted for text in texts]),
        "stock_in_a_batch_of_two": _counted([text.batched for text in texts]),
        "nodes_per_step": round(spec.total_stats.nodes_per_step, 1),
    }
    if reason := spec.total_stats.disabled_reason:
        told["disabled_reason"] = reason
    return told


def _counted(partings: Sequence[Parting | None]) -> dict[str, Any]:
    """How many differ, and the gaps of those that do."""
    found = [parting for parting in partings if parting is not None]
    told: dict[str, Any] = {"num_differ": len(found), "share": round(len(found) / len(partings), 4)}
    if found:
        told["median_at"] = median(each.at for each in found)
        told["largest_gap"] = round(max(each.gap for each in found), 6)
        told["median_ulps"] = round(median(each.ulps for each in found), 2)
        told["largest_ulps"] = round(max(each.ulps for each in found), 2)
    return told


def _table(told: dict[str, dict[str, Any]]) -> str:
    """Two rows a dtype: selfspec against stock, and stock against itself."""
    columns = {
        "largest_gap": "largest gap",
        "median_ulps": "median, ulps",
        "largest_ulps": "largest",
    }
    rows = [["dtype", "compared with stock", "texts", "differ", *columns.values()]]
    names = {"selfspec": "selfspec", "stock_in_a_batch_of_two": "stock in a batch of two"}
    for dtype, figures in told.items():
        for key, name in names.items():
            counted = figures[key]
            share = f"{counted['num_differ']} ({counted['share']:.1%})"
            gaps = (str(counted.get(column, "–")) for column in columns)
            rows.append([dtype, name, str(figures["num_prompts"]), share, *gaps])
    return markdown(rows)


def _settings(options: argparse.Namespace, num_prompts: int, model: Any) -> dict[str, Any]:
    names = "shape device max_nodes max_new_tokens text task every offset seed"
    return {
        "bench": "same_text",
        "model": Path(options.model).name,
        **{name: getattr(options, name) for name in names.split()},
        "knobs": options.knob,
        "machine": machine(options.device),
        "attention": model.config._attn_implementation,
        "num_prompts": num_prompts,
        **versions(),
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.same_text", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = parser.add_argument
    add_model_options(option)
    dtypes = f"default: {' '.join(_DTYPES)}"
    option("--dtypes", nargs="+", choices=DTYPES, default=list(_DTYPES), help=dtypes)
    option("--max-nodes", type=int, default=16, metavar="N", help="of selfspec's trees")
    option("--knob", nargs="*", default=[], metavar="NAME=VALUE", help="other knobs of SpecConfig")
    add_prompt_options(option)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""How often drafting changes a greedy text in half precision, and how near a tie it was.

    python -m eval same_text --model PATH --questions question.jsonl --dtypes bfloat16 float16

A forward of another width rounds differently. So does stock's own, from one batch size to the
next: beside the texts on which selfspec parts from stock, those are counted on which stock parts
from itself, once the same prompt stands left-padded in a batch of two. Where a text parts, the
gap is how far stock's own scores put the other token behind stock's, in logits and in ulps: steps
of the dtype at that score. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from eval.benches.prompts import EVERY, Prompts, load_prompts
from eval.methods.method import sampling
from eval.methods.sameness import Parting, parting
from eval.models.loading import DTYPES, load_asked, load_tokenizer
from eval.options import add_drafting, add_model, add_questions, drafting_knobs
from eval.report.table import Table
from eval.runs.environment import told, where
from selfspec import SelfSpec

_DTYPES = ("bfloat16", "float16", "float32")
_COLUMNS = {
    "dtype": "{dtype}",
    "compared with stock": "{name}",
    "texts": "{number}",
    "differ": "{num_differ} ({share:.1%})",
    "largest gap": "{largest_gap}",
    "median, ulps": "{median_ulps}",
    "largest": "{largest_ulps}",
}
_NUM_PADS = 8  # in front of a prompt that stands beside a longer one


class Texts(NamedTuple):
    """What became of one prompt's texts; None where they are stock's."""

    drafted: Parting | None
    batched: Parting | None


def run(options: argparse.Namespace) -> int:
    """Compares in each dtype, and prints a table and the JSON line."""
    prompts = load_prompts(options, load_tokenizer(options.model))
    found = {}
    for dtype in dict.fromkeys(options.dtypes):
        model = load_asked(options, dtype)
        found[dtype] = _measured(model, prompts, options)
        print(f"{dtype}: {len(prompts)} texts compared", flush=True)
    print(_table(found))
    asked = {**where(model), "knobs": drafting_knobs(options), "num_prompts": len(prompts)}
    print(json.dumps(told("same_text", options, **asked | {"dtypes": found})))
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
        drafted = model.generate(**alone, **asked, custom_generate=partial(spec, streamer=None))
        pair = beside_a_longer_one(ids, pad)
        batched = model.generate(**pair, **asked)[0, pair["input_ids"].shape[1] :]
        batched = batched[: len(stock.scores)]  # padded behind its end while the other row goes on
        yield Texts(
            _beside(stock, drafted[0, ids.shape[1] :], model.dtype),
            _beside(stock, batched, model.dtype),
        )


def _beside(stock: Any, new_ids: torch.Tensor, dtype: torch.dtype) -> Parting | None:
    """Where new ids leave those of stock's output, by the scores that it has of its one row."""
    expected = stock.sequences[0, -len(stock.scores) :].tolist()
    return parting(expected, new_ids.tolist(), lambda at: stock.scores[at][0], dtype)


def beside_a_longer_one(ids: torch.Tensor, pad_token_id: int) -> dict[str, torch.Tensor]:
    """A batch of the prompt (1, L), left-padded, and of a text that is longer by as much."""
    num_pads = min(_NUM_PADS, ids.shape[1])
    pads = torch.full_like(ids[:, :num_pads], pad_token_id)
    short, long = torch.cat([pads, ids], dim=1), torch.cat([ids[:, :num_pads], ids], dim=1)
    input_ids = torch.cat([short, long])
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :num_pads] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _pad_token(model: Any) -> int:
    """Any token will do: the mask hides it."""
    pad = model.generation_config.pad_token_id
    return 0 if pad is None else pad


def _measured(model: Any, prompts: Prompts, options: argparse.Namespace) -> dict[str, Any]:
    spec = SelfSpec(**drafting_knobs(options))
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


def _table(found: dict[str, dict[str, Any]]) -> str:
    """Two rows a dtype: selfspec against stock, and stock against itself."""
    names = {"selfspec": "selfspec", "stock_in_a_batch_of_two": "stock in a batch of two"}
    gaps = dict.fromkeys(("largest_gap", "median_ulps", "largest_ulps"))
    rows = [
        {"dtype": dtype, "name": name, "number": figures["num_prompts"], **gaps, **figures[key]}
        for dtype, figures in found.items()
        for key, name in names.items()
    ]
    return Table.of("Texts that part from stock's", _COLUMNS, rows).markdown()


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    add_model(parser)
    dtypes = f"default: {' '.join(_DTYPES)}"
    option("--dtypes", nargs="+", choices=DTYPES, default=list(_DTYPES), help=dtypes)
    add_drafting(parser)
    option("--text", choices=["questions", "random"], default="questions", help="what is answered")
    add_questions(parser, limit="the first N prompts; default: all, or 20 random ones")
    option("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    option("--seed", type=int, default=0, metavar="N", help="of random texts; default: 0")
    parser.set_defaults(every=EVERY, device="cpu")

"""A whole model shared by two unequal units, after Ghidorah's HCMP (figure 9).

    python -m eval hetero --model PATH --columns 256 --width 4 8 16 32 64

times a whole Llama after a text of --columns tokens: on one unit, on two that are split by rows as
Megatron-LM does it, and on two that are split by columns. Of attention, the first unit computes the
part that all nodes see and the second one the tree. The units are two CPU cores, the second one
slowed by another process (--load); shares are found by profiling each while the other one works.
All ways are run in turns; times are medians, and the logits are compared with the model's own. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import torch

from eval.hetero_units.model import timed_widths, widths_table
from eval.hetero_units.unit import busy_core, two_cores, two_units
from eval.models.loading import load_model
from eval.options import check_at_least
from eval.runs.environment import tell

# Rounding is far below this; a part that is missing or joined wrongly is above it.
_SAME = 1e-4


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 where logits are wrong."""
    check_at_least(options, 1, "width", "columns", "rounds")
    check_at_least(options, 0, "load")
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = list(_timed(options))
    print(widths_table(rows).markdown(), end="\n\n")
    tell("hetero", options, rows=rows)
    return int(not all(row["difference"] <= _SAME for row in rows))


def tree_parents(width: int) -> list[int]:
    """The parents of a tree of so many nodes: each has one of the three nodes before it.

    >>> tree_parents(8)
    [-1, 0, 1, 0, 2, 4, 4, 5]
    """
    chance = random.Random(0)
    return [-1, *(chance.randrange(max(0, node - 3), node) for node in range(1, width))]


def _timed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = load_model(options.model, dtype="float32", device="cpu")
    trees = list(map(tree_parents, options.width))
    _, second_core = two_cores()
    with busy_core(second_core, options.load), two_units() as units:
        for columns in options.columns:
            dice, num_ids = torch.Generator().manual_seed(0), model.config.vocab_size
            prompt_ids = torch.randint(num_ids, (1, columns), generator=dice)
            rows = timed_widths(model, prompt_ids, units, trees, options.rounds)
            yield from ({"columns": columns, **row} for row in rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help="a whole Llama; default: the embedded model")
    add("--width", type=int, nargs="+", default=[16], metavar="N", help="nodes; default: 16")
    add("--columns", type=int, nargs="+", default=[512], metavar="N", help="committed tokens")
    add("--load", type=int, default=1, metavar="N", help="processes on core two; default: 1")
    add("--rounds", type=int, default=15, metavar="N", help="default: 15")

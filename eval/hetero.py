"""A whole model shared by two unequal units, after Ghidorah's HCMP, and attention alone.

    python -m eval hetero --model PATH --columns 256 --width 4 8 16 32 64

times a whole Llama after a text of --columns tokens: on one unit, on two that are split by rows as
Megatron-LM does it, and on two that are split by columns (figure 9). Of attention, the first unit
computes the part that all nodes see and the second one the tree. The units are two CPU cores, the
second one slowed by another process (--load); shares are found by profiling each while the other
one works.

    python -m eval hetero --boundary --columns 256 1024 4096 --width 64

times attention alone, on two units, with all of the text on the first one and with a boundary that
was found by trying (figure 10(a)). With --units cuda, they are a CUDA device and the CPU beside it.

    python -m eval hetero --attention --columns 512 4096 --width 16 64

times attention alone, on one unit: under one mask, in two parts, and with the tree as a naive
sparse product (figure 10(b)). All ways are run in turns; times are medians, and each outcome is
compared with the model's own, or with plain masked attention. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from eval.errors import EvalError
from eval.hetero_units.attention import (
    DTYPES,
    attention_table,
    boundary_table,
    timed_attention,
    timed_boundaries,
)
from eval.hetero_units.model import timed_widths, widths_table
from eval.hetero_units.unit import Pair, busy_core, cores_for, two_units
from eval.models.loading import load_model
from eval.models.shapes import SHAPES, named_shape
from eval.options import check_at_least
from eval.runs.environment import tell

# Rounding is far below this, by dtype; a part that is missing or joined wrongly is above it.
_SAME = {"float32": 1e-4, "bfloat16": 0.05}


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 where an outcome is wrong."""
    check_at_least(options, 1, "width", "columns", "rounds")
    check_at_least(options, 0, "load")
    if options.units == "cuda" and not (options.attention or options.boundary):
        raise EvalError("--units must be cpu for a whole model (got cuda)")
    if options.units == "cuda" and not torch.cuda.is_available():
        raise EvalError("--units must be cpu where there is no CUDA device (got cuda)")
    torch.set_num_threads(1)
    timed, table_of = _widths, widths_table
    if options.attention:
        timed, table_of = _attention, attention_table
    elif options.boundary:
        timed, table_of = _boundaries, boundary_table
    with torch.inference_mode():
        rows = list(timed(options))
    print(table_of(rows).markdown(), end="\n\n")
    tell("hetero", options, rows=rows)
    allowed = (_SAME[row.get("dtype", "float32")] for row in rows)
    return int(not all(row["difference"] <= most for row, most in zip(rows, allowed, strict=True)))


def tree_parents(width: int) -> list[int]:
    """The parents of a tree of so many nodes: each hangs on one of the three nodes before it.

    >>> tree_parents(8)
    [-1, 0, 1, 0, 2, 4, 4, 5]
    """
    chance = random.Random(0)
    return [-1, *(chance.randrange(max(0, node - 3), node) for node in range(1, width))]


def _widths(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = load_model(options.model, dtype="float32", device="cpu")
    trees = list(map(tree_parents, options.width))
    with _units(options) as units:
        for columns in options.columns:
            dice, num_ids = torch.Generator().manual_seed(0), model.config.vocab_size
            prompt_ids = torch.randint(num_ids, (1, columns), generator=dice)
            rows = timed_widths(model, prompt_ids, units, trees, options.rounds)
            yield from ({"columns": columns, **row} for row in rows)


def _boundaries(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape = named_shape(options.shape)
    with _units(options) as units:
        for columns, width in itertools.product(options.columns, options.width):
            yield timed_boundaries(shape, units, tree_parents(width), columns, options.rounds)


def _attention(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape, where = named_shape(options.shape), (torch.device(options.units), options.rounds)
    for columns, width, dtype in itertools.product(options.columns, options.width, DTYPES):
        yield timed_attention(shape, tree_parents(width), columns, dtype, *where)


@contextmanager
def _units(options: argparse.Namespace) -> Iterator[Pair]:
    """Both units, the second one slowed."""
    core = min(cores_for(options.units)[1])
    slowed = busy_core(core, options.load) if options.units == "cpu" else nullcontext()
    with slowed, two_units(options.units) as units:
        yield units


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help="a whole Llama; default: the embedded model")
    add("--boundary", action="store_true", help="time attention by the boundary of both units")
    add("--attention", action="store_true", help="time attention alone, on one unit")
    names = ", ".join(SHAPES)
    add("--shape", default="1b", help=f"whose attention is timed: {names}; default: 1b")
    add("--width", type=int, nargs="+", default=[16], metavar="N", help="nodes; default: 16")
    add("--columns", type=int, nargs="+", default=[512], metavar="N", help="committed tokens")
    add("--units", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--load", type=int, default=1, metavar="N", help="processes on core two; default: 1")
    add("--rounds", type=int, default=15, metavar="N", help="default: 15")

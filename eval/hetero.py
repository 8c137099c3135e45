"""A decoder layer, or a whole model, shared by two unequal units, after Ghidorah's HCMP.

    python -m eval hetero --columns 512 4096 --width 16 --out hetero.json

Linear layers are split by columns between two units. Of attention, the first unit computes the
part that all nodes see and the second one the tree, and both are joined by their log-sum-exp. The
units are two CPU cores, the second one slowed by another process (--load), or with --units cuda a
CUDA device and the CPU beside it.

Compared are either unit alone, an even split, the split found by profiling each unit while the
other one rests, the one found while the other one works too, and what torch's own threads do on
all cores. All are run in turns; times are medians. No model is needed: weights are random, in the
size of a layer of --shape. Each outcome is compared with that of plain masked attention and whole
matrices.

    python -m eval hetero --attention --columns 512 4096 --width 16 64

times attention alone, on one unit: under one mask, in two parts, and with the tree as a naive
sparse product, as in Ghidorah's figure 10(b).

    python -m eval hetero --model PATH --columns 256 --width 4 8 16 32 64

times a whole Llama behind a text of so many tokens: on one unit, on two that are split by rows as
Megatron-LM does it, and on two that are split by columns (figure 9).

    python -m eval hetero --boundary --columns 256 1024 4096 --width 64

times attention alone, on two units, with all of the text on the first one and with a boundary that
was found by trying (figure 10(a)). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from eval.errors import EvalError
from eval.models.loading import load_model
from eval.models.shapes import SHAPES, GrownShape, named_shape
from eval.options import check_at_least
from eval.report.table import Table
from eval.runs.environment import told
from eval.units.attention import DTYPES, Case, attention_table, timed_attention
from eval.units.figures import boundary_table, timed_boundaries, timed_widths, widths_table
from eval.units.unit import Pair, busy_core, cores_for, two_units
from eval.units.ways import timed_ways, ways_table
from selfspec.machine.user_files import replace_text

# Rounding is far below this; a part that is missing or joined wrongly is above it.
_SAME = 1e-4
_Timed = Callable[[GrownShape, argparse.Namespace], Iterator[dict[str, Any]]]
_OfSize = Callable[[GrownShape, Pair, int, int, int], Iterable[dict[str, Any]]]


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 where an outcome is wrong."""
    _check(options)
    torch.set_num_threads(1)
    shape = named_shape(options.shape)
    timed, table_of = _what(options)
    rows = list(timed(shape, options))
    print(table_of(rows).markdown(), end="\n\n")
    line = json.dumps(told("hetero", options, rows=rows))
    if options.out:
        replace_text(options.out, line + "\n")
    print(line)
    is_wrong = not options.attention and any(row["difference"] > _SAME for row in rows)
    return int(is_wrong)


def _what(options: argparse.Namespace) -> tuple[_Timed, Callable[..., Table]]:
    if options.attention:
        return _attention, attention_table
    if options.boundary:
        return _by_sizes(timed_boundaries), boundary_table
    return (_widths, widths_table) if options.model else (_by_sizes(timed_ways), ways_table)


def _widths(_shape: GrownShape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = load_model(options.model, dtype="float32", device="cpu")
    with _units(options) as units, torch.inference_mode():
        for columns in options.columns:
            _say(f"profiling and timing: the model behind {columns} tokens")
            dice, num_ids = torch.Generator().manual_seed(0), model.config.vocab_size
            prompt_ids = torch.randint(num_ids, (1, columns), generator=dice)
            rows = timed_widths(model, prompt_ids, units, options.width, options.rounds)
            yield from ({"columns": columns, **row} for row in rows)


@contextmanager
def _units(options: argparse.Namespace) -> Iterator[Pair]:
    """Both units, the second one slowed."""
    core = min(cores_for(options.units)[1])
    slowed = busy_core(core, options.load) if options.units == "cpu" else nullcontext()
    with slowed, two_units(options.units) as units:
        yield units


def _by_sizes(timed: _OfSize) -> _Timed:
    """What is timed on two units, for each size."""

    def all_sizes(shape: GrownShape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        with _units(options) as units, torch.inference_mode():
            for columns, width in itertools.product(options.columns, options.width):
                _say(f"profiling and timing: {columns} committed tokens, {width} nodes")
                yield from timed(shape, units, columns, width, options.rounds)

    return all_sizes


def _attention(shape: GrownShape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device(options.units)
    for each in itertools.product(options.columns, options.width, DTYPES):
        _say(f"timing: {each[0]} committed tokens, {each[1]} nodes, {each[2]}")
        yield timed_attention(shape, Case(*each), device, options.rounds)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check(options: argparse.Namespace) -> None:
    check_at_least(options, 1, "width", "columns", "rounds")
    check_at_least(options, 0, "load")
    if options.model and options.units != "cpu":
        raise EvalError("--units must be cpu for a whole model (got cuda)")
    if options.units == "cuda" and not torch.cuda.is_available():
        raise EvalError("--units must be cpu where there is no CUDA device (got cuda)")
    if options.out and not options.out.parent.is_dir():
        raise EvalError(f"--out must be a file in a folder that exists (got {options.out})")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--attention", action="store_true", help="time attention alone, on one unit")
    add("--boundary", action="store_true", help="time attention by the boundary of both units")
    add("--model", metavar="PATH", help="time a whole Llama instead of one layer")
    add("--shape", default="1b", help=f"of the layer: {', '.join(SHAPES)}; default: 1b")
    add("--width", type=int, nargs="+", default=[16], metavar="N", help="nodes; default: 16")
    add("--columns", type=int, nargs="+", default=[512], metavar="N", help="committed tokens")
    add("--units", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--load", type=int, default=1, metavar="N", help="processes on core two; default: 1")
    add("--rounds", type=int, default=15, metavar="N", help="default: 15")
    add("--out", type=Path, metavar="FILE.json", help="also write the JSON object there")

"""How many operations a captured forward starts, in each layer and around the layers.

    python -m eval launches --model PATH --width 1 8

On a card, small kernels are most of the time of a small model, and each operation that is no view
is a kernel or more. They are counted in a forward over fixed KV slots, as a capture would record
it, so any machine can count them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from eval.models.loading import load_asked
from eval.options import add_model, check_at_least
from eval.report.table import Table
from eval.runs.captured import AROUND, Launches, decoder_layers, fixed_forward
from eval.runs.environment import tell, where

_PROMPT_TOKENS = 16
_COLUMNS = {
    "width": "{width}",
    "a layer": "{layer}",
    "the dearest layer": "{dearest}",
    "around the layers": "{around}",
    "all": "{all}",
    "in a layer": "{in_layer}",
}


def run(options: argparse.Namespace) -> int:
    """Counts a forward of each width, and prints a table and the JSON line."""
    check_at_least(options, 1, "width")
    model = load_asked(options)
    rows = [launches(model, width) for width in options.width]
    title = "Operations of a captured forward that are no views"
    note = "A layer is the median one; the first of a kind also makes what the others share."
    print(Table.of(title, _COLUMNS, rows, note).telling().markdown())
    return tell("launches", options, **where(model), rows=rows)


def launches(model: Any, width: int) -> dict[str, Any]:
    """What a forward of this width starts; refuses a model that no capture can run."""
    layers, counted = decoder_layers(model), Launches()
    forward = fixed_forward(model, width, _PROMPT_TOKENS, captures=False)
    with counted.inside(layers):
        forward()
    around = counted.counts.pop(AROUND)
    layers_by_cost = sorted(counted.counts.values(), key=Counter.total)
    usual, dearest = layers_by_cost[(len(layers) - 1) // 2], layers_by_cost[-1]
    return {
        "width": width,
        "layer": usual.total(),
        "dearest": dearest.total(),
        "around": around.total(),
        "all": around.total() + sum(count.total() for count in counted.counts.values()),
        "in_layer": ", ".join(f"{number} {name}" for name, number in usual.most_common()),
        "in_around": dict(around.most_common()),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, dtype="float32", device="cpu")
    parser.add_argument(
        "--width", nargs="+", type=int, default=[1, 8], metavar="N", help="default: 1 8"
    )

"""`selfspec profile`: measures a forward of each width, and shows a table and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from selfspec.building.limits import max_positions
from selfspec.cli.errors import CliError
from selfspec.cli.paint import harmless
from selfspec.cli.waiting import working
from selfspec.cost import CostCurve

__all__ = [
    "check_context",
    "curve_plot",
    "curve_table",
    "described",
    "measured",
    "print_curve",
    "write_curve",
]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64
_MAX_LINES = 8  # Lines of the plot above its axis.


def measured(
    model: Any, num_columns: int, num_rows: int, forward: str
) -> tuple[dict[str, str | int], CostCurve]:
    """What the costs depend on, and the costs themselves, measured behind a text of that length."""
    from selfspec.config import SpecConfig
    from selfspec.run.prepared import profile

    check_context(num_columns, model)
    with working("Measuring forwards of each width"):
        config = SpecConfig.of(forward=forward)
        about, curve = profile(model, config, num_columns=num_columns, num_rows=num_rows)
    return described(about, num_columns), curve


def check_context(num_columns: int, model: Any) -> None:
    """Refuses a text that leaves no room for a draft in the model's positions."""
    limit = max_positions(model)
    if limit is not None and num_columns >= limit:
        raise CliError(f"--context must be < {limit}, the model's positions (got {num_columns})")


def print_curve(
    curve: CostCurve, about: Mapping[str, str | int], console: Console | None = None
) -> None:
    """Prints what was measured and where, the table, and below it the plot."""
    console = console or Console()
    for name, value in about.items():
        console.print(harmless(f"{name}: {value}"), markup=False, highlight=False)
    console.print(curve_table(curve))
    console.print("seconds of a forward in plain steps, by its width", highlight=False)
    console.print(curve_plot(curve), markup=False, highlight=False, soft_wrap=True)


def described(about: Mapping[str, str | int], num_columns: int) -> dict[str, str | int]:
    """What a curve depends on, with the length of text in words: similar lengths share a curve."""
    from selfspec.run.costs import context_bucket

    shortest, longest = context_bucket(num_columns)
    used = f"the costs are used for {shortest} to {longest} tokens"
    return {**about, "context": f"{num_columns} tokens ({used})"}


def curve_table(curve: CostCurve) -> Table:
    """A line for each measured width. A step that costs n plain ones pays if it brings n tokens."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("width", "ms", "plain steps", "ms a node"):
        table.add_column(title, justify="right")
    for width in curve.widths:
        milliseconds = 1000 * curve.seconds(width)
        cells = (_digits(milliseconds), f"{curve.relative(width):.2f}")
        table.add_row(str(width), *cells, _digits(milliseconds / width))
    return table


def curve_plot(curve: CostCurve) -> str:
    """A plot of the cost of a forward in plain steps by its width, both at a linear scale."""
    widest = curve.widths[-1]
    costs = [curve.relative(_width_at(column, widest)) for column in range(_COLUMNS)]
    tick = _tick(max(costs))
    heights = [round(8 * cost / tick) for cost in costs]  # in eighths of a line
    ticks = [f"{line * tick:g}" for line in range(math.ceil(max(heights) / 8) + 1)]
    margin = max(map(len, ticks))
    lines = [f"{t:>{margin}} |{_line(heights, i)}" for i, t in enumerate(ticks[1:])]
    axis = f"{ticks[0]:>{margin}} +" + "-" * _COLUMNS
    return "\n".join([*reversed(lines), axis, " " * (margin + 2) + _labels(curve.widths)])


def write_curve(path: Path, curve: CostCurve, about: Mapping[str, str | int]) -> None:
    """Writes the curve as JSON: what was measured, and seconds and plain steps by width."""
    widths = curve.widths
    values = {
        "about": dict(about),
        "widths": list(widths),
        "seconds": [curve.seconds(width) for width in widths],
        "plain_steps": [curve.relative(width) for width in widths],
    }
    try:
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"--output must be writable (got {str(path)!r}: {error})") from error


def _digits(value: float) -> str:
    """A number with three significant digits, without an exponent.

    >>> _digits(0.01234), _digits(21.26), _digits(1040.2)
    ('0.0123', '21.3', '1040')
    """
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _width_at(column: int, widest: int) -> int:
    return 1 + column * widest // _COLUMNS


def _column_of(width: int, widest: int) -> int:
    """The first column that shows a width, or else the one where it would be."""
    return -(-(width - 1) * _COLUMNS // widest)


def _tick(highest: float) -> float:
    """The height of a line: 1/4 of a plain step, doubled until the plot is low enough."""
    tick = 0.25
    while tick * _MAX_LINES < highest:
        tick *= 2
    return tick


def _line(heights: list[int], line: int) -> str:
    return "".join(_EIGHTHS[min(max(height - 8 * line, 0), 8)] for height in heights).rstrip()


def _labels(widths: tuple[int, ...]) -> str:
    """The widths below their columns; those that have no room are left out."""
    text = ""
    for width in widths:
        column = _column_of(width, widths[-1])
        if not text or column > len(text):
            text = text.ljust(column) + str(width)
    return text

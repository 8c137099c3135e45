"""A picture, in text, of what a forward costs by its width."""

from __future__ import annotations

import math

from selfspec.cost import CostCurve

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64
_MAX_LINES = 8  # Lines of the plot above its axis.


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

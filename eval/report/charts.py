"""The kinds of charts in a report: bars in groups, lines, stacked bars, points.

Each takes names and numbers, and knows nothing of where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eval.report.svg import LETTER, Canvas, Colors, Scale

_WIDTH = 780.0
_LEFT, _RIGHT = 46.0, 770.0
_TOP = 22.0  # where the legend's first line is


class Bar(NamedTuple):
    """A height, and how far it spreads."""

    value: float
    low: float | None = None
    high: float | None = None


class Point(NamedTuple):
    """A place, what belongs to it, and whether it is one of the main ones."""

    x: float
    y: float
    series: str
    name: str
    is_main: bool


def grouped_bars(
    groups: Mapping[str, Mapping[str, Bar]], colors: Colors, *, label: str, unit: str, base: float
) -> str:
    """A group of bars for each name, one a series; they stand on `base`."""
    canvas = Canvas(_WIDTH, 330, label)
    top = canvas.legend(colors, _LEFT, _TOP) + 24
    bars = [bar for series in groups.values() for bar in series.values()]
    ends = [end for bar in bars for end in (bar.value, bar.low, bar.high) if end is not None]
    low, high = min([base, *ends]), max([base, *ends])
    y = Scale(low, high * 1.04, 286, top)
    canvas.y_axis(y, _LEFT, _RIGHT, unit)
    step = (_RIGHT - _LEFT) / max(len(groups), 1)
    for number, (name, series) in enumerate(groups.items()):
        left = _LEFT + number * step
        canvas.text(left + step / 2, 308, _fitted(name, step), "middle", "name")
        _group(canvas, series, colors, y, base, left + step * 0.1, step * 0.8)
    canvas.line([(_LEFT, y(base)), (_RIGHT, y(base))], "base")
    return canvas.svg()


def line_chart(
    lines: Mapping[str, Mapping[float, float]],
    colors: Colors,
    *,
    label: str,
    unit: str,
    x_title: str,
) -> str:
    """A line with its points for each series, from 0 up."""
    canvas = Canvas(_WIDTH, 300, label)
    top = canvas.legend(colors, _LEFT, _TOP) + 24 if len(colors) > 1 else _TOP
    xs = [x for line in lines.values() for x in line]
    ys = [value for line in lines.values() for value in line.values()]
    x = Scale(min(xs), max(xs), _LEFT + 14, _RIGHT - 14)
    y = Scale(0, max(ys) * 1.06, 244, top)
    canvas.y_axis(y, _LEFT, _RIGHT, unit)
    for value in _labelled(sorted(set(xs)), x):
        canvas.text(x(value), 262, f"{value:g}", "middle", "tick")
    canvas.text((_LEFT + _RIGHT) / 2, 286, x_title, "middle", "title")
    for name, line in lines.items():
        canvas.line(
            [(x(at), y(value)) for at, value in sorted(line.items())], "curve", colors[name]
        )
        for at, value in line.items():
            canvas.dot(x(at), y(value), 3, colors[name], f"{name}, {at:g}: {value:.3g}{unit}")
    return canvas.svg()


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]], colors: Colors, *, label: str, x_title: str
) -> str:
    """A bar from left to right for each row, in parts."""
    margin = 20 + max(map(len, rows)) * LETTER
    canvas = Canvas(_WIDTH, 0, label)
    top = canvas.legend(colors, margin, _TOP) + 14
    bottom = top + 30 * len(rows)
    canvas.height = bottom + 46
    x = Scale(0, max(sum(parts.values()) for parts in rows.values()) * 1.1, margin, _RIGHT)
    canvas.x_axis(x, top, bottom)
    canvas.text((margin + _RIGHT) / 2, bottom + 38, x_title, "middle", "title")
    for number, (name, parts) in enumerate(rows.items()):
        y, so_far = top + 30 * number, 0.0
        canvas.text(margin - 8, y + 20, name, "end", "name")
        for part, value in parts.items():
            tip = f"{name}, {part}: {value:.3g}"
            canvas.rect(x(so_far), y + 5, x(so_far + value) - x(so_far), 20, colors[part], tip)
            so_far += value
        canvas.text(x(so_far) + 6, y + 20, f"{so_far:.3g}", "start", "tick")
    return canvas.svg()


def points_chart(
    points: Sequence[Point], colors: Colors, *, label: str, x_title: str, y_title: str
) -> str:
    """Points, the main ones with their names beside them."""
    canvas = Canvas(_WIDTH, 360, label)
    canvas.text(_LEFT - 30, _TOP - 4, y_title, "start", "title")
    x = Scale(0, max(point.x for point in points) * 1.12, _LEFT, _RIGHT)
    y = Scale(0, max(point.y for point in points) * 1.08, 304, _TOP + 8)
    canvas.y_axis(y, _LEFT, _RIGHT)
    canvas.x_axis(x, _TOP + 8, 304)
    canvas.text((_LEFT + _RIGHT) / 2, 344, x_title, "middle", "title")
    for point in sorted(points, key=lambda point: point.is_main):
        tip = f"{point.series}, {point.name}: {point.y:.2f} at {point.x:.1f}"
        radius = 6 if point.is_main else 2.5
        canvas.dot(x(point.x), y(point.y), radius, colors[point.series], tip)
    _names(canvas, [point for point in points if point.is_main], colors, x, y)
    return canvas.svg()


def _group(
    canvas: Canvas,
    series: Mapping[str, Bar],
    colors: Colors,
    y: Scale,
    base: float,
    left: float,
    width: float,
) -> None:
    thick = min(width / max(len(series), 1), 34)
    left += (width - thick * len(series)) / 2
    for number, (name, bar) in enumerate(series.items()):
        x = left + number * thick
        height = y(bar.value) - y(base)
        canvas.rect(x + 1, y(base), thick - 2, height, colors[name], f"{name}: {bar.value:.2f}")
        if bar.low is not None and bar.high is not None:
            middle = x + thick / 2
            canvas.line([(middle, y(bar.low)), (middle, y(bar.high))], "whisker")


def _names(canvas: Canvas, points: Sequence[Point], colors: Colors, x: Scale, y: Scale) -> None:
    """Beside their points, from the top down, none of them over another one."""
    taken: list[tuple[float, float, float]] = []  # left, right, baseline
    for point in sorted(points, key=lambda point: -point.y):
        width = len(point.series) * LETTER
        is_right = x(point.x) + 10 + width <= _RIGHT
        left = x(point.x) + 10 if is_right else x(point.x) - 10 - width
        line = y(point.y) + 4
        while any(left < b and a < left + width and abs(line - at) < 13 for a, b, at in taken):
            line += 2
        canvas.text(left, line, point.series, "start", "name", colors[point.series])
        taken.append((left, left + width, line))


def _labelled(values: Sequence[float], scale: Scale) -> list[float]:
    """Those with room for their number below the axis."""
    kept: list[float] = []
    for value in values:
        if not kept or scale(value) - scale(kept[-1]) >= 20:
            kept.append(value)
    return kept


def _fitted(name: str, width: float) -> str:
    most = max(int(width / LETTER), 4)
    return name if len(name) <= most else name[: most - 1] + "…"

"""Drawing in SVG: marks on a canvas, axes with round numbers, legends. Knows nothing of figures.

Colours are names of classes and variables, which the page's style sheet gives, light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Colors = Mapping[str, str]

_STEPS = 6  # of an axis, at most
LETTER = 6.4  # mean width of a letter, in pixels


class Scale:
    """From values to pixels, straight; `low` and `high` are where the axis begins and ends."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1)
        return self._start + share * (self._end - self._start)


class Canvas:
    """Marks, in the order in which they were made."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label = label
        self._marks: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, color: str, tip: str = ""
    ) -> None:
        """Where a width or a height is negative, it goes the other way."""
        x, y = min(x, x + width), min(y, y + height)
        box = f'x="{x:.1f}" y="{y:.1f}" width="{abs(width):.1f}" height="{abs(height):.1f}"'
        self._mark("rect", f'{box} style="fill:{color}"', tip)

    def line(self, points: Sequence[tuple[float, float]], kind: str, color: str = "") -> None:
        """Straight from point to point; `kind` is a class: grid, axis, base, whisker or curve."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f' style="stroke:{color}"' if color else ""
        self._mark("polyline", f'points="{path}" class="{kind}"{style}')

    def dot(self, x: float, y: float, radius: float, color: str, tip: str = "") -> None:
        self._mark("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="fill:{color}"', tip)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: str = "start",
        kind: str = "",
        color: str = "",
    ) -> None:
        """Anchored at its start, middle or end; in the colour of its kind, or its own."""
        where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        shown = f' class="{kind}"' * bool(kind) + f' style="fill:{color}"' * bool(color)
        self._marks.append(f"<text {where}{shown}>{escape(words)}</text>")

    def legend(self, colors: Colors, x: float, y: float) -> float:
        """Names with their colours, in columns as wide as the canvas; returns where it ends."""
        column = 28 + max(map(len, colors)) * LETTER
        in_line = max(int((self.width - x) / column), 1)
        for number, (name, color) in enumerate(colors.items()):
            left, line = x + number % in_line * column, y + number // in_line * 18
            self.rect(left, line - 9, 10, 10, color)
            self.text(left + 15, line, name)
        return y + (len(colors) - 1) // in_line * 18

    def y_axis(self, scale: Scale, left: float, right: float, unit: str = "") -> None:
        """Lines across the plot at round values, with their numbers on the left."""
        for value in ticks(scale.low, scale.high):
            self.line([(left, scale(value)), (right, scale(value))], "grid")
            self.text(left - 6, scale(value) + 4, f"{value:g}{unit}", "end", "tick")

    def x_axis(self, scale: Scale, top: float, bottom: float) -> None:
        """Lines down the plot at round values, with their numbers below."""
        for value in ticks(scale.low, scale.high):
            self.line([(scale(value), top), (scale(value), bottom)], "grid")
            self.text(scale(value), bottom + 16, f"{value:g}", "middle", "tick")

    def svg(self) -> str:
        box = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img"'
        name = f'aria-label="{escape(self._label)}"'
        return f"<svg {box} {name}>{''.join(self._marks)}</svg>"

    def _mark(self, element: str, attributes: str, tip: str = "") -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self._marks.append(f"<{element} {attributes}>{inside}</{element}>")


def ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`, six steps at most.

    >>> ticks(0, 3.4)
    [0.0, 1.0, 2.0, 3.0]
    """
    span = (high - low) or 1
    size = 10 ** math.floor(math.log10(span / _STEPS))
    step = next(
        size * factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (size * factor) <= _STEPS
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]

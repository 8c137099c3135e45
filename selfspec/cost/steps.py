"""Forwards of fixed shapes come in a few widths: what lies between two costs as the wider one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from selfspec.cost.curve import CostCurve
from selfspec.cost.measuring import WIDTHS

# From here on every multiple of this width is a step.
_WIDE = 64
# The steps that are measured.
STEPS = tuple(1 << power for power in range(WIDTHS[-1].bit_length()))


def stepped(width: int) -> int:
    """The width of a forward of fixed shape that has room for `width` >= 1 queries.

    >>> [stepped(width) for width in (1, 3, 9, 64, 65, 200)]
    [1, 4, 16, 64, 128, 256]
    """
    if width > _WIDE:
        return -(-width // _WIDE) * _WIDE
    return 1 << (width - 1).bit_length()


class SteppedCurve(CostCurve):
    """A cost curve of such forwards: level up to each step.

    >>> curve = SteppedCurve({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.020})
    >>> [round(1000 * curve.seconds(width)) for width in (1, 3, 4, 5, 8)]
    [10, 12, 12, 20, 20]
    """

    def seconds(self, width: int) -> float:
        """The seconds of the forward that has room for `width` >= 1 queries."""
        return super().seconds(stepped(width))

    def table(self, widest: int) -> list[float]:
        """The seconds of every width up to `widest`, each at its own index; [0] is a filler."""
        seconds = super().table(stepped(widest))
        return [seconds[step] for step in _steps_up_to(widest)]

    def corners(self, widest: int) -> Sequence[int]:
        """The steps up to `widest`: below each of them the curve is level."""
        return [step for step in sorted(set(_steps_up_to(widest))) if 0 < step <= widest]

    def refine(self, width: int, seconds: float) -> None:
        """Takes in what a real step of this width took: it was as wide as its step."""
        super().refine(stepped(width), seconds)


@cache
def _steps_up_to(widest: int) -> tuple[int, ...]:
    """The step of each width, at its own index; [0] is a filler."""
    return (0, *map(stepped, range(1, widest + 1)))

"""What a node costs beside the forward: to be drafted, laid out, read and learned from."""

from __future__ import annotations

__all__ = ["NodeCost"]

_FADE = 0.99  # a step's weight after each later one
_FIRM = 1.0  # square of the widths' spread that a slope needs to be half believed
_ODD = 3.0  # times the usual: beyond, it was held up by something else


class NodeCost:
    """Seconds for each node of width: the slope of a fading line through what steps took.

    Only the slope: what a step takes whatever its width does not speak for or against a node.
    Where the width hardly changes, none is to be seen, and none is assumed.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._width = 0.0  # fading means
        self._rest = 0.0
        self._width_spread = 0.0  # fading sums of squares and products about them
        self._joint_spread = 0.0

    @property
    def seconds(self) -> float:
        """Of one node; never negative."""
        return max(self._joint_spread / (self._width_spread + _FIRM * self._weight + 1e-9), 0.0)

    def observe(self, width: int, rest: float) -> None:
        """Takes in a step of this width and its seconds beside the forward."""
        if self._weight:
            rest = min(rest, _ODD * self._rest)
        self._weight = _FADE * self._weight + 1
        width_news, rest_news = width - self._width, rest - self._rest
        self._width += width_news / self._weight
        self._rest += rest_news / self._weight
        left = width - self._width  # of the news, behind the mean's move
        self._width_spread = _FADE * self._width_spread + width_news * left
        self._joint_spread = _FADE * self._joint_spread + rest_news * left

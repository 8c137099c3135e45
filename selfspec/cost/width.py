"""How wide a step pays.

The tokens that a tree of w nodes brings are 1 + Σ of its first w - 1 scores: a node's score is
the chance that it is accepted, and the model's own next token comes in any case. The best width
has the most tokens a second. Width 1, plain decoding, is one of the choices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from selfspec.cost.curve import CostCurve


class Choice(NamedTuple):
    """A width, and the tokens a second that it is expected to bring."""

    width: int
    rate: float


def best_width(scores: Sequence[Sequence[float]], curve: CostCurve, max_nodes: int) -> Choice:
    """The width that brings the most tokens a second, of those from 1 to `max_nodes`.

    `scores` has a list for every row that shares the forward: the scores of its tree's nodes in
    the order they were added, without the root. A row whose tree has fewer brings what it has.
    The narrowest of equal ones is taken.
    """
    search = WidthSearch(curve, max_nodes, num_rows=len(scores))
    gains = map(sum, zip_longest(*scores, fillvalue=0.0))
    for _, gain in zip(range(1, max_nodes), gains, strict=False):
        search.add(gain)
    return search.best


class WidthSearch:
    """The best width of one tree, known while it grows, node by node, best score first.

    ``take(score)`` before a node; where it says no, growth is over, and the tree is cut to
    the first `best.width` nodes. Costs less than 1 µs a node.

    >>> search = WidthSearch(CostCurve({1: 1.0, 2: 1.1, 4: 1.3, 8: 4.0}), max_nodes=8)
    >>> [search.take(score) for score in (0.9, 0.6, 0.5, 0.4)]
    [True, True, True, False]
    >>> search.num_nodes, search.best.width
    (4, 4)
    """

    def __init__(self, curve: CostCurve, max_nodes: int, num_rows: int = 1) -> None:
        self._costs = curve.table(max_nodes)  # For each number of nodes.
        self._ends = curve.ends(max_nodes)
        self._tokens = float(num_rows)
        self.num_nodes = 1
        self.best = Choice(1, self._tokens / self._costs[1])

    def take(self, score: float) -> bool:
        """Counts the next node in, unless no tree with it can beat the best one so far.

        Exact as long as no later score is above this one.
        """
        if self.num_nodes + 1 >= len(self._costs):
            return False
        before = self.num_nodes, self._tokens
        if self.add(score) or self._may_pay(score, *before):
            return True
        self.num_nodes, self._tokens = before
        return False

    def add(self, gain: float) -> bool:
        """Adds one node to every row, `gain` for all together; is this the best width so far?"""
        self.num_nodes, self._tokens = self.num_nodes + 1, self._tokens + gain
        rate = self._tokens / self._costs[self.num_nodes]
        if rate <= self.best.rate:
            return False
        self.best = Choice(self.num_nodes, rate)
        return True

    def _may_pay(self, score: float, num_nodes: int, tokens: float) -> bool:
        """Could any wider tree beat the best one, if every further node had this score?

        With n nodes that bring S tokens, the best rate R so far, and no further score above s, a
        tree of w > n nodes brings at most S + (w - n)·s tokens. It beats R only if

            f(w) = S + (w - n)·s - R·T(w) > 0.

        T is level up to every width that has a time of its own, and f does not fall there. So it is
        highest at one of these widths or at max. Where f is not above 0 at those beyond n and at
        max, no wider tree pays, and none of those that have lower scores.
        """
        spare, rate, costs = tokens - num_nodes * score, self.best.rate, self._costs
        wider = self._ends[bisect_right(self._ends, num_nodes) :]
        return any(spare + width * score > rate * costs[width] for width in wider)

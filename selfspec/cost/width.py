"""How wide a step pays.

The tokens that a tree of w nodes brings are 1 + Σ of its first w - 1 scores: a node's score is
the chance that it is accepted, and the model's own next token comes in any case. The best width
has the most tokens a second. Width 1, plain decoding, is one of the choices.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from selfspec.cost.curve import CostCurve


class Choice(NamedTuple):
    """A width, and what it is expected to bring."""

    width: int
    tokens: float  # The tokens of all rows in one forward.
    rate: float  # Tokens a second.


class StepCosts:
    """The seconds of steps with chains or trees, by width.

    `num_pending` tokens are read in front of a chain whose wrong drafts can't be taken back. If it
    has a wrong draft, they and what was accepted are read once more. None: wrong drafts are taken
    back.
    """

    def __init__(self, curve: CostCurve, max_nodes: int, num_pending: int | None) -> None:
        self._reads_again = num_pending is not None
        self._pending = pending = num_pending or 0
        self._table = curve.table(pending + max_nodes)
        self.by_width = self._table[pending:]  # Those of the forwards alone.
        self.ends = [end - pending for end in curve.ends(pending + max_nodes) if end > pending]

    def seconds(self, width: int, tokens: float, score: float) -> float:
        """What `width` nodes cost, whose last one has the chance `score`, the others `tokens`."""
        wrong = 1 - score
        if not self._reads_again or wrong <= 0:
            return self.by_width[width]
        read_again = self._pending + (tokens - (width - 1) * score) / wrong
        again = self._table[min(1 + math.ceil(read_again), len(self._table) - 1)] - self._table[1]
        return self.by_width[width] + wrong * again


def best_width(
    scores: Sequence[Sequence[float]],
    curve: CostCurve,
    max_nodes: int,
    num_pending: int | None = None,
) -> Choice:
    """The width that brings the most tokens a second, of those from 1 to `max_nodes`.

    `scores` has a list for each row that shares the forward: the scores of its tree's nodes in
    the order they were added, without the root. A row whose tree has fewer brings what it has.
    The narrowest of equal ones is taken.
    """
    num_rows, costs = len(scores), StepCosts(curve, max_nodes, num_pending)
    tokens = float(num_rows)
    best = Choice(1, tokens, tokens / costs.by_width[1])
    gains = map(sum, zip_longest(*scores, fillvalue=0.0))
    for width, gain in zip(range(2, max_nodes + 1), gains, strict=False):
        seconds = costs.seconds(width, tokens / num_rows, gain / num_rows)
        tokens += gain
        if tokens / seconds > best.rate:
            best = Choice(width, tokens, tokens / seconds)
    return best


class WidthSearch:
    """The best width of one tree, found while it grows, node by node, best score first.

    ``take(score)`` before each node; where it says no, growth is over, and the tree is cut to
    the first `best.width` nodes. Costs less than 1 µs a node.

    >>> search = WidthSearch(CostCurve({1: 1.0, 2: 1.1, 4: 1.3, 8: 4.0}), max_nodes=8)
    >>> [search.take(score) for score in (0.9, 0.6, 0.5, 0.4)]
    [True, True, True, False]
    >>> search.num_nodes, search.best.width
    (4, 4)
    """

    def __init__(self, curve: CostCurve, max_nodes: int, num_pending: int | None = None) -> None:
        self._costs = StepCosts(curve, max_nodes, num_pending)
        self._tokens = 1.0
        self.num_nodes = 1
        self.best = Choice(1, 1.0, 1.0 / self._costs.by_width[1])

    def take(self, score: float) -> bool:
        """Counts the next node in, unless no tree with it can beat the best one so far.

        Exact as long as no later score is above this one.
        """
        width = self.num_nodes + 1
        if width >= len(self._costs.by_width):
            return False
        tokens = self._tokens + score
        rate = tokens / self._costs.seconds(width, self._tokens, score)
        if rate > self.best.rate:
            self.best = Choice(width, tokens, rate)
        elif not self._may_pay(score):
            return False
        self.num_nodes, self._tokens = width, tokens
        return True

    def _may_pay(self, score: float) -> bool:
        """Could any wider tree beat the best one, if every further node had this score?

        With n nodes that bring S tokens, the best rate R so far, and no further score above s, a
        tree of w > n nodes brings at most S + (w - n)·s tokens. It beats R only if

            f(w) = S + (w - n)·s - R·T(w) > 0.

        T is level up to each width that has a time of its own, and f does not fall there. So it is
        highest at one of these widths or at max. Where f is not above 0 at those beyond n and at
        max, no wider tree pays, and none of those that have lower scores.
        """
        spare = self._tokens - self.num_nodes * score
        rate, costs, ends = self.best.rate, self._costs.by_width, self._costs.ends
        wider = ends[bisect_right(ends, self.num_nodes) :]
        return any(spare + width * score > rate * costs[width] for width in wider)

"""The tree with the best expected acceptance for each width, as Ghidorah's ARCA looks for it.

A node is accepted if all candidates on the way to it come true, so its chance is the product of
their rates, and a tree is expected to yield 1 + the sum of its nodes' chances in tokens a step. A
child is never likelier than its parent. So the likeliest nodes are a tree by themselves, and adding
the likeliest next finds the best one.

The paper takes rates by depth and rank alone for that, and then swaps nodes by what was counted of
each single place. A tree that grows by the rates of the places is the one that such swaps reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from selfspec.cost import CostCurve
from selfspec.draft.fitted import FittedTree
from selfspec.fitting.counts import AcceptanceCounts, Path

# The rates of the candidates behind a node, by rank; none where a tree may not be deeper.
Rates = Callable[[Path], Sequence[float]]


class Fit(NamedTuple):
    """The best tree of one width, and what it is worth here."""

    tree: FittedTree
    seconds: float  # What a forward of this width costs.

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tree.expected / self.seconds


def best_tree(rates: Rates, num_nodes: int) -> dict[Path, float]:
    """The likeliest nodes below the root with their chances, likeliest first; fewer if no more are.

    >>> best_tree(lambda path: (0.5, 0.4) if len(path) < 2 else (), 3)
    {(0,): 0.5, (1,): 0.4, (0, 0): 0.25}
    """
    tree: dict[Path, float] = {}
    waiting = [(-chance, path) for path, chance in _children((), 1.0, rates)]
    heapq.heapify(waiting)
    while waiting and len(tree) < num_nodes:
        negative, path = heapq.heappop(waiting)
        tree[path] = -negative
        for child, chance in _children(path, -negative, rates):
            heapq.heappush(waiting, (-chance, child))
    return tree


def fitted(tree: Mapping[Path, float]) -> FittedTree:
    """The tree with its places in order: the likeliest first, and each behind its parent."""
    order = sorted(tree, key=lambda path: (-tree[path], len(path), path))
    nodes = {(): 0} | {path: node for node, path in enumerate(order, start=1)}
    return FittedTree(
        tuple(nodes[path[:-1]] for path in order),
        tuple(path[-1] for path in order),
        tuple(tree[path] for path in order),
    )


class TreeSearch:
    """Finds the best tree of any width and at most `max_depth`, by what was counted."""

    def __init__(self, counts: AcceptanceCounts, max_depth: int) -> None:
        self._counts = counts
        self._levels = counts.rates(max_depth)
        self._known: dict[Path, Sequence[float]] = {}

    def fit(self, width: int, curve: CostCurve) -> Fit:
        """The best tree of `width` >= 2 nodes, or of fewer where no more candidates came true."""
        tree = fitted(best_tree(self._rates, width - 1))
        return Fit(tree, curve.seconds(tree.width))

    def _rates(self, path: Path) -> Sequence[float]:
        if path not in self._known:
            level = self._levels[len(path)] if len(path) < len(self._levels) else ()
            self._known[path] = self._counts.rates_behind(path, level)
        return self._known[path]


def best_fit(fits: Sequence[Fit]) -> Fit:
    """The one with the most tokens a second; the narrowest of equal ones."""
    return max(fits, key=lambda fit: (fit.rate, -fit.tree.width))


def _children(path: Path, chance: float, rates: Rates) -> Iterator[tuple[Path, float]]:
    for rank, rate in enumerate(rates(path)):
        if rate > 0:
            yield (*path, rank), chance * rate

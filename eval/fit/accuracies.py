"""Ghidorah's calibration: how often each place of a tree comes true, and which width is fastest."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from eval.papers.ghidorah import FittedTree
from selfspec.records import StepRecord

Ranks = tuple[int, ...]  # The path to a node: (0, 2) is the third candidate after the first one.
# The rates of the candidates after a node, by rank; none where a tree may not be deeper.
Rates = Callable[[Ranks], Sequence[float]]

# What is known of less exact kinds counts as much as this many trials: of the level above for a
# level, and of the whole level for a single place.
_TRUST = 8.0


def best_tree(rates: Rates, num_drafted: int) -> FittedTree:
    """A shape: the `num_drafted` likeliest nodes, likeliest first; none whose rate is 0.

    A child is never likelier than its parent, so the likeliest node next gives the best tree of
    every width.

    >>> best_tree(lambda path: (0.5, 0.4) if len(path) < 2 else (), 3)
    FittedTree(parents=(0, 0, 1), ranks=(0, 1, 0), chances=(0.5, 0.4, 0.25))
    """
    parents, ranks, chances = list[int](), list[int](), list[float]()
    waiting: list[tuple[float, Ranks, int]] = []

    def add_children(path: Ranks, node: int, chance: float) -> None:
        for rank, rate in enumerate(rates(path)):
            if rate > 0:
                heapq.heappush(waiting, (-chance * rate, (*path, rank), node))

    add_children((), 0, 1.0)
    while waiting and len(parents) < num_drafted:
        negative, path, parent = heapq.heappop(waiting)
        parents.append(parent)
        ranks.append(path[-1])
        chances.append(-negative)
        add_children(path, len(parents), -negative)
    return FittedTree(tuple(parents), tuple(ranks), tuple(chances))


def fastest_width(tree: FittedTree, seconds: Sequence[float]) -> int:
    """The width that yields the most tokens a second, 2 at least; `seconds` are by width."""
    tokens = [1.0, 1.0]
    for chance in tree.chances:
        tokens.append(tokens[-1] + chance)
    widths = range(2, min(len(tokens), len(seconds)))
    return max(widths, key=lambda width: tokens[width] / seconds[width])


class Accuracies:
    """How often the candidate at each place came true, given that its parent had.

    `SelfSpec.listening(accuracies.observe)` counts.
    """

    def __init__(self) -> None:
        self.trials: Counter[Ranks] = Counter()  # of a true node's candidates
        self.hits: Counter[Ranks] = Counter()  # of a candidate

    def observe(self, record: StepRecord) -> None:
        """Follows the committed tokens down the tree, as far as candidates were looked at.

        A candidate counts also where the budget left no node for it. What comes after a node
        whose candidates nobody looked at is unknown, and not counted.
        """
        path: Ranks = ()
        for node, token in zip(record.path, record.committed_ids, strict=False):
            siblings = record.tree.looked_at[node]
            if siblings is None:
                return
            self.trials[path] += 1
            if token not in siblings.tokens:
                return
            path = (*path, siblings.tokens.index(token))
            self.hits[path] += 1

    def levels(self) -> tuple[Counter[int], Counter[tuple[int, int]]]:
        """Trials by the depth of the parent, and hits by that depth and the rank."""
        trials, hits = Counter[int](), Counter[tuple[int, int]]()
        for path, number in self.trials.items():
            trials[len(path)] += number
        for path, number in self.hits.items():
            hits[len(path) - 1, path[-1]] += number
        return trials, hits

    def rates(self, max_depth: int) -> Rates:
        """The rate of each place. A place with few trials leans on its level, and so on upwards."""
        trials, hits = self.levels()
        above = [0.0] * (1 + max((path[-1] for path in self.hits), default=-1))
        levels: list[list[float]] = []
        for depth in range(max_depth):
            trust = _TRUST if depth else 0.0
            total = trials[depth] + trust
            above = [
                (hits[depth, rank] + trust * rate) / total if total else 0.0
                for rank, rate in enumerate(above)
            ]
            levels.append(above)

        def rates_after(path: Ranks) -> list[float]:
            level = levels[len(path)] if len(path) < max_depth else []
            total = self.trials[path] + _TRUST
            places = [(*path, rank) for rank in range(len(level))]
            return [
                (self.hits[place] + _TRUST * rate) / total
                for place, rate in zip(places, level, strict=True)
            ]

        return rates_after

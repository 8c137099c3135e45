"""How often the candidate at each place of a tree came true, given that its parent had.

A place is named by the ranks that lead to it, from 0: (0, 2) is the third candidate behind the
first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from selfspec.records import StepRecord

Path = tuple[int, ...]

# What is known of less exact kinds counts as much as this many trials: of the level above for a
# level, and of the whole level for a single place.
_TRUST = 8.0


class AcceptanceCounts:
    """Counts steps, as a listener of a `SelfSpec`; each costs a look at its accepted path."""

    def __init__(self) -> None:
        self.trials: Counter[Path] = Counter()  # How often a true node's candidates were looked at.
        self.hits: Counter[Path] = Counter()  # How often a candidate came true.

    def observe(self, record: StepRecord) -> None:
        """Follows the committed tokens down the tree, as far as candidates were looked at.

        A candidate counts also where the budget left no node for it. What comes behind a node
        whose candidates nobody looked at is unknown, and not counted.
        """
        path: Path = ()
        for node, token in zip(record.path, record.committed_ids, strict=False):
            siblings = record.tree.looked_at[node]
            if siblings is None:
                return
            self.trials[path] += 1
            if token not in siblings.tokens:
                return
            path = (*path, siblings.tokens.index(token))
            self.hits[path] += 1

    def rates(self, max_depth: int) -> list[list[float]]:
        """The rate at each depth and rank: how often it came true, if its parent had.

        A level with few trials leans on the one above, and one without has the same rates.
        """
        trials, hits = self.by_depth()
        width = 1 + max((path[-1] for path in self.hits), default=-1)
        levels: list[list[float]] = []
        above = [0.0] * width
        for depth in range(max_depth):
            trust = _TRUST if depth else 0.0
            total = trials[depth] + trust
            above = [
                (hits[depth, rank] + trust * rate) / total if total else 0.0
                for rank, rate in enumerate(above)
            ]
            levels.append(above)
        return levels

    def rates_behind(self, path: Path, level: Sequence[float]) -> list[float]:
        """The rates of the candidates behind one node; where it had few trials, its level's."""
        total = self.trials[path] + _TRUST
        hits = (self.hits.get((*path, rank), 0) for rank in range(len(level)))
        return [(hit + _TRUST * rate) / total for hit, rate in zip(hits, level, strict=True)]

    def by_depth(self) -> tuple[Counter[int], Counter[tuple[int, int]]]:
        """Trials by the depth of the parent, and hits by that depth and the rank."""
        trials: Counter[int] = Counter()
        hits: Counter[tuple[int, int]] = Counter()
        for path, number in self.trials.items():
            trials[len(path)] += number
        for path, number in self.hits.items():
            hits[len(path) - 1, path[-1]] += number
        return trials, hits

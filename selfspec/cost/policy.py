"""How a step spends its width: all that is allowed, what pays, or what is likely enough.

The engine asks a budget before and while it drafts, and reports what came of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from selfspec.cost.budget import Choice, CoolDown, WidthSearch, best_width
from selfspec.cost.curve import CostCurve
from selfspec.cost.ledger import Ledger
from selfspec.cost.pacing import PacedStep, Pacing
from selfspec.cost.riders import RiderWorth
from selfspec.cost.threshold import AdaptiveThreshold
from selfspec.records import DRAFT_MODEL, DraftTree, StepRecord, sources_of

__all__ = ["Budget", "FixedBudget", "MeasuredBudget", "ThresholdBudget"]


class Budget(Protocol):
    """What the engine asks in each step."""

    def max_nodes(self, allowed: int) -> int:
        """The most nodes that are worth looking for, of those allowed; asked once a step."""
        ...

    def search(self, max_nodes: int) -> Callable[[float], bool] | None:
        """Asked for each tree: says, score by score, whether its next node may pay."""
        ...

    def fit(
        self, trees: Sequence[DraftTree], max_nodes: int, num_queries: Sequence[int] = ()
    ) -> bool:
        """Cuts the trees of a batch to the width that pays for all of them.

        `num_queries` is what each row's branches would ask beside its tree. Returns whether they
        may; then the trees are as wide as pays beside them.
        """
        ...

    def pays_to_read(self, scores: Sequence[float]) -> bool:
        """Is a draft model's forward over nodes with these scores worth its time?"""
        ...

    def observe_reading(self, seconds: float, num_tokens: int) -> None:
        """Learns what a draft model's forward over so many tokens took."""
        ...

    def observe(self, width: int, seconds: float, records: Sequence[StepRecord]) -> None:
        """Learns what a forward of this width cost, and what came of it."""
        ...


class FixedBudget:
    """Always all that is allowed."""

    def max_nodes(self, allowed: int) -> int:
        """All that are allowed."""
        return allowed

    def search(self, max_nodes: int) -> Callable[[float], bool] | None:
        """None: a tree takes all nodes that are allowed."""
        return None

    def fit(
        self, trees: Sequence[DraftTree], max_nodes: int, num_queries: Sequence[int] = ()
    ) -> bool:
        """Trees stay as they are, and branches always ride."""
        return True

    def pays_to_read(self, scores: Sequence[float]) -> bool:
        """True: a draft model reads whatever node is wanted."""
        return True

    def observe_reading(self, seconds: float, num_tokens: int) -> None:
        """Learns nothing."""

    def observe(self, width: int, seconds: float, records: Sequence[StepRecord]) -> None:
        """Learns nothing."""


class ThresholdBudget(FixedBudget):
    """EdgeLLM's policy: what is likely enough is drafted, whatever it costs; serves one call.

    A step drafts one token at least, however unlikely: only what was drafted moves the threshold.
    """

    def __init__(self) -> None:
        self._threshold = AdaptiveThreshold()

    def search(self, max_nodes: int) -> Callable[[float], bool]:
        """The first node may be taken in any case, others while they are above the threshold."""
        first = iter([True])
        return lambda score: next(first, False) or score >= self._threshold.value

    def pays_to_read(self, scores: Sequence[float]) -> bool:
        """A draft model reads as long as a node is above the threshold."""
        return max(scores) >= self._threshold.value

    def observe(self, width: int, seconds: float, records: Sequence[StepRecord]) -> None:
        """Moves the threshold by how far each tree's best branch was right."""
        for record in records:
            leaf = _leaf_below(record.tree, record.path[-1])
            num_right = len(record.path) - 1
            self._threshold.observe(record.tree.depths[leaf], num_right, record.tree.scores[leaf])


class MeasuredBudget:
    """The width that brings the most tokens a second, by a measured curve.

    Serves one call, or rows that come and go. `pacing` knows what a draft model costs and brings;
    None if there is none. `ledger` outlives calls, so that many short ones lose no more than a long
    one; None: a new one.
    """

    def __init__(
        self, curve: CostCurve, pacing: Pacing | None = None, ledger: Ledger | None = None
    ) -> None:
        self._curve = curve
        self._pacing = pacing
        self._reads = False  # May this step ask the draft model?
        self._reading = 0.0  # Seconds that it took in this step.
        self._promised = 0.0  # The scores of what it read.
        self._cool_down = CoolDown()
        self._riders = RiderWorth()
        self._looks = True  # Does this step look for drafts?
        self._search: WidthSearch | None = None  # The one that grew the last tree.
        self._ledger = Ledger() if ledger is None else ledger

    def use(self, curve: CostCurve) -> None:
        """From now on forwards cost what this curve says: rows have come or gone."""
        self._curve = curve

    def max_nodes(self, allowed: int) -> int:
        """Twice the widest step that was timed; 1 until plain steps were, and while drafts lose.

        So the cost of wide steps is found out by using them, and never by a leap.
        """
        may_lose = self._curve.knows_plain and self._ledger.may_lose(self._curve.seconds(1))
        self._looks = may_lose and self._cool_down.may_draft()
        self._reading = self._promised = 0.0
        self._reads = (
            self._looks
            and self._pacing is not None
            and self._pacing.may_read(self._curve.seconds(1))
        )
        return min(allowed, 2 * self._curve.widest_seen) if self._looks else 1

    def search(self, max_nodes: int) -> Callable[[float], bool] | None:
        """Says where the growth of a tree may stop."""
        self._search = WidthSearch(self._curve, max_nodes) if max_nodes > 1 else None
        return self._search.take if self._search else None

    def fit(
        self, trees: Sequence[DraftTree], max_nodes: int, num_queries: Sequence[int] = ()
    ) -> bool:
        """All rows share a forward, and so its width; branches ride where that pays more."""
        choice = self._choice(trees, max_nodes)
        beside = self._choice_beside(trees, max_nodes, max(num_queries, default=0))
        rides = beside is not None and self._riders.pay(
            sum(num_queries), beside.tokens * (choice.rate / beside.rate - 1)
        )
        width = beside.width if beside is not None and rides else choice.width
        for tree in trees:
            if len(tree) > width:
                tree.cut(width)
        return rides

    def _choice(self, trees: Sequence[DraftTree], max_nodes: int) -> Choice:
        if len(trees) == 1 and self._search and self._search.num_nodes == len(trees[0]):
            return self._search.best  # It was found while the only tree grew.
        return self._best_width(trees, max_nodes)

    def _choice_beside(
        self, trees: Sequence[DraftTree], max_nodes: int, num_queries: int
    ) -> Choice | None:
        """The width that pays beside branches; None where there are none, and while drafts rest."""
        if not self._looks or not num_queries:
            return None
        return self._best_width(trees, max_nodes, num_queries)

    def _best_width(
        self, trees: Sequence[DraftTree], max_nodes: int, num_queries: int = 0
    ) -> Choice:
        widest = min(max(map(len, trees)), max_nodes)
        scores = [tree.scores[1:] for tree in trees]
        return best_width(scores, self._curve, widest, beside=num_queries)

    def pays_to_read(self, scores: Sequence[float]) -> bool:
        """Is what the scores promise worth more time than the draft model's forward takes?"""
        promised = sum(scores)
        if self._pacing is None or not self._reads or not self._pacing.pays(promised):
            return False
        self._promised += promised
        return True

    def observe_reading(self, seconds: float, num_tokens: int) -> None:
        """Learns what the draft model's forward took."""
        if self._pacing is not None:
            self._reading += self._pacing.observe_forward(seconds, num_tokens)

    def observe(self, width: int, seconds: float, records: Sequence[StepRecord]) -> None:
        """Refines the curve; a try that brought nothing counts towards leaving drafting alone.

        Drafts answer for what their width costs by the curve. A slow moment of the machine slows
        plain steps too.
        """
        self._curve.refine(width, seconds)
        tokens = sum(len(record.committed_ids) for record in records) / max(len(records), 1)
        plain, taken = self._curve.seconds(1), self._curve.seconds(width)
        self._ledger.observe(seconds, tokens * plain - taken if width > 1 else 0.0)
        if self._pacing is not None:
            self._pacing.observe_step(self._paced_step(taken, records))
        if self._looks:
            self._cool_down.observe(sum(record.num_accepted for record in records))
        for record in records:
            self._riders.observe(record.num_branch_queries, record.num_from_branches)

    def _paced_step(self, seconds: float, records: Sequence[StepRecord]) -> PacedStep:
        return PacedStep(
            self._looks,
            seconds,
            self._reading,
            self._promised,
            sum(len(record.committed_ids) for record in records),
            sum(map(_num_named, records)),
        )


def _num_named(record: StepRecord) -> int:
    """How many accepted tokens a draft model named."""
    named = (sources_of(record.tree.evidence[node]) for node in record.accepted_nodes())
    return sum(DRAFT_MODEL in sources for sources in named)


def _leaf_below(tree: DraftTree, node: int) -> int:
    """The end of the likeliest branch through a node: always the child that was added first."""
    while tree.children[node]:
        node = min(tree.children[node].values())
    return node

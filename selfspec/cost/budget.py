"""How a step spends its width: all that is allowed, or what pays.

The engine asks a budget for a step, lets the step decide while it drafts, and tells it what came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.cost.curve import CostCurve
from selfspec.cost.ledger import Ledger
from selfspec.cost.slowness import TimedStep
from selfspec.cost.width import WidthSearch, best_width
from selfspec.records import DraftTree, Pays, StepRecord, TimeBudget

# A node brings its score in tokens now, and about 0.01 later by what the model says after it.
_LESSON = 0.01
# After 64 steps with drafts, a plain step is timed again.
_RETIME = 64
# Statistics mention that drafting was paused if 16 steps or more, and half of all, were plain.
_MANY = 16


class StepTime(NamedTuple):
    """The width of a step's forward, and its seconds: to draft, and for all the rest."""

    width: int
    drafting: float
    rest: float


class Step:
    """One step's width, as it is decided. This one takes all that is allowed."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes  # The most nodes that are worth looking for.

    def search(self) -> Pays | None:
        """A function that says, node by node, whether one more may pay; None: every node may.

        It gets the tree so far and the score of the next node.
        """
        return None

    def fit(self, trees: Sequence[DraftTree]) -> None:
        """Cuts the trees of a batch to the width that pays for all of them."""

    def observe(self, took: StepTime, records: Sequence[StepRecord]) -> None:
        """Learns what the step took, and what came of it."""


class Budget(TimeBudget):
    """Decides on the steps of one call, or of rows that come and go.

    `SelfSpec(budget=...)` takes yours; it can't change the text. This one takes all that is
    allowed.
    """

    def open(self) -> Budget:
        """The budget of one call. One that keeps something from step to step returns a new one."""
        return self

    def step(self, allowed: int) -> Step:
        """The next step, of at most `allowed` nodes."""
        return Step(allowed)

    def use_curve(self, num_rows: int, curve: CostCurve) -> None:
        """Told how forwards are run from now, how many rows share them, and what they cost."""

    def paused(self, num_plain: int, num_steps: int) -> str | None:
        """Why drafting was paused, if `num_plain` of a call's steps are a good part of them."""
        return None


class MeasuredBudget(Budget):
    """Chooses the width that brings the most tokens a second, from the times of earlier steps.

    Serves one call, or rows that come and go. `curve` is what steps cost; None: what `use_curve`
    says. `ledger` outlives calls, so that many short ones lose no more than a long one; None: a new
    one.
    """

    def __init__(self, curve: CostCurve | None = None, ledger: Ledger | None = None) -> None:
        self._keeps_curve = curve is not None
        self.curve = CostCurve.unknown(1.0) if curve is None else curve
        self.ledger = Ledger() if ledger is None else ledger
        self.num_since_plain = 0
        self._num_rows = 0
        self._drafting = deque([0.0, 0.0], maxlen=5)  # Time to draft, in plain steps.

    def use_curve(self, num_rows: int, curve: CostCurve) -> None:
        """Uses this curve from now on."""
        self._num_rows = num_rows
        if not self._keeps_curve:
            self.curve = curve

    def step(self, allowed: int) -> MeasuredStep:
        """A step as wide as the ledger allows; 1 until plain steps were timed, and now and then."""
        curve = self.curve
        is_late = self.num_since_plain >= _RETIME
        if is_late or not curve.knows_plain or curve.slowness.needs_plain:
            return MeasuredStep(self, 1)
        most = curve.seconds(1) * (1 + self.ledger.may_lose())
        return MeasuredStep(self, curve.widest_within(most, allowed))

    def paused(self, num_plain: int, num_steps: int) -> str | None:
        """A note on the cost of drafts if at least half of the steps, and 16, were plain."""
        if num_plain < max(_MANY, num_steps / 2):
            return None
        cost = f"a step of 4 tokens takes {self.curve.relative(4):.1f} plain steps"
        return f"no drafts in {num_plain} of {num_steps} steps: {cost}"

    def break_even_tokens(self, seconds: float) -> float:
        """How many tokens all rows got lately in this time: while one row drafts, all wait."""
        return max(self._num_rows, 1) * self.ledger.rate * seconds / self.curve.seconds(1)

    def affords(self, seconds: float | None) -> bool:
        """Only what drafts may lose; nothing before plain steps were timed.

        What nobody knows counts as a plain step, and leaves one for drafts that are there already.
        """
        plain = self.curve.seconds(1)
        needed = 2 * plain if seconds is None else seconds
        return self.curve.knows_plain and needed < self.ledger.may_lose() * plain

    def drafted(self, seconds: float) -> float:
        """What a step is charged for its drafting, in plain steps.

        A machine that was held up for a second would forbid drafts for thousands of steps. So a
        step is charged at most a plain step more than the second longest of the steps before it.
        """
        drafting, usual = seconds / self.curve.seconds(1), sorted(self._drafting)[-2]
        self._drafting.append(drafting)
        return min(drafting, usual + 1)

    def charge(self, seconds: float) -> None:
        steps = seconds / self.curve.seconds(1)
        self.ledger.observe(steps, -steps)


class MeasuredStep(Step):
    def __init__(self, budget: MeasuredBudget, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self._budget = budget
        self._trust = budget.ledger.trust
        self._search: WidthSearch | None = None  # The one that grew the last tree.

    def search(self) -> Pays | None:
        if self.max_nodes <= 1:
            return None
        search, trust = WidthSearch(self._budget.curve, self.max_nodes), self._trust
        self._search = search
        return lambda _tree, score: search.take(trust * score + _LESSON)

    def fit(self, trees: Sequence[DraftTree]) -> None:
        """All rows share a forward, and so its width."""
        if self._search is not None and len(trees) == 1:
            choice = self._search.best  # Found while the only tree grew.
        else:
            worth = [
                [self._trust * score + _LESSON for score in tree.scores[1 : self.max_nodes]]
                for tree in trees
            ]
            most = 1 + max(map(len, worth))
            choice = best_width(worth, self._budget.curve, most)
        for tree in trees:
            if len(tree) > choice.width:
                tree.cut(choice.width)

    def observe(self, took: StepTime, records: Sequence[StepRecord]) -> None:
        """Refines the curve, and weighs what such a step takes against plain steps for its tokens.

        A step is charged what the curve says once it has learned from it, since one slow step of a
        known width is bad luck. As the first step of a width may be unlucky too, no step is charged
        more than a plain step beyond what was expected. The curve will expect more of the next one.
        What is missing then is charged once steps with drafts turn out to be slow for longer.
        """
        budget, curve = self._budget, self._budget.curve
        expected = curve.relative(took.width)
        curve.refine(took.width, took.rest)
        plain = curve.seconds(1)
        steps = min(curve.relative(took.width), expected + 1)
        seen = TimedStep(took.width, took.rest, expected + max(expected, 1.0), steps)
        missing = curve.slowness.observe(seen, plain)
        if curve.slowness.is_over(plain):
            budget.ledger.forgive()
        steps += budget.drafted(took.drafting)
        num_tokens = sum(len(record.committed_ids) for record in records)
        drafts = self.max_nodes > 1 or took.width > 1
        saved = num_tokens / max(len(records), 1) - steps if drafts else 0.0
        budget.ledger.observe(
            steps + missing,
            saved - missing,
            promised=sum(sum(record.tree.scores) - 1 for record in records),
            num_accepted=sum(record.num_accepted for record in records),
        )
        budget.num_since_plain = 0 if took.width == 1 else budget.num_since_plain + 1

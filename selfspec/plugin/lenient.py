"""What a default assistant drafts with: an error of it ends drafts, and no text.

Code that knows nothing of selfspec has called the model. So if what was learned belongs to another
vocabulary, if its file is damaged, or if a budget or a shape of the user's fails, the call goes on
without drafts, with the reason in its statistics. An assistant that a call names raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from selfspec.cost import Budget, CostCurve, Step, StepTime
from selfspec.draft.calibration import Calibration
from selfspec.draft.learned import Learned
from selfspec.draft.shape import Shape
from selfspec.draft.tree import TreeGrower
from selfspec.errors import one_line
from selfspec.records import DraftTree, Pays, StepRecord
from selfspec.stats import GenerationStats


class Lenient:
    """Inside, an error ends the drafts of one call. `has_failed` says whether one did."""

    def __init__(self, stats: GenerationStats) -> None:
        self.has_failed = False
        self._stats = stats

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.has_failed = True
        reason = one_line(error).partition(";")[0]
        self._stats.disable(f"its default assistant has failed ({reason})")
        return True

    def learned(self, opened: Callable[[int], Learned], vocab_size: int) -> Learned:
        with self:
            learned = opened(vocab_size)
            own = type(learned.shape) is not Shape
            return replace(learned, shape=_Shape(learned.shape, self)) if own else learned
        return Learned([], Calibration(), top_k=1)

    def budget(self, own: Budget) -> Budget:
        with self:
            return _Budget(own.open(), self)
        return _NoDrafts()


class _Shape(Shape):
    def __init__(self, own: Shape, lenient: Lenient) -> None:
        self._own, self._lenient = own, lenient

    def for_row(self, prompt_ids: Sequence[int], *, learns: bool) -> Shape:
        with self._lenient:
            return _Shape(self._own.for_row(prompt_ids, learns=learns), self._lenient)
        return self

    def grow(self, grower: TreeGrower) -> None:
        if self._lenient.has_failed:
            return
        try:
            self._own.grow(grower)
        except Exception:
            if grower.asked is not None:  # A source has failed, and the others go on.
                raise
            with self._lenient:
                raise

    def observe(self, record: StepRecord) -> None:
        with self._lenient:
            if not self._lenient.has_failed:
                self._own.observe(record)


class _NoDrafts(Budget):
    def step(self, allowed: int, num_pending: int | None = None) -> Step:
        return Step(1)


class _Budget(Budget):
    def __init__(self, own: Budget, lenient: Lenient) -> None:
        self._own, self._lenient = own, lenient

    @property
    def _now(self) -> Budget:
        return _NoDrafts() if self._lenient.has_failed else self._own

    def step(self, allowed: int, num_pending: int | None = None) -> Step:
        with self._lenient:
            return _Step(self._now.step(allowed, num_pending), self._lenient)
        return Step(1)

    def run_as(self, kind: str, num_rows: int, curve: CostCurve) -> None:
        with self._lenient:
            self._now.run_as(kind, num_rows, curve)

    def paused(self, num_plain: int, num_steps: int) -> str | None:
        with self._lenient:
            return self._now.paused(num_plain, num_steps)
        return None

    def break_even_tokens(self, seconds: float) -> float:
        with self._lenient:
            return self._now.break_even_tokens(seconds)
        return 0.0

    def affords(self, seconds: float | None) -> bool:
        with self._lenient:
            return self._now.affords(seconds)
        return False

    def charge(self, seconds: float) -> None:
        with self._lenient:
            self._now.charge(seconds)


class _Step(Step):
    def __init__(self, own: Step, lenient: Lenient) -> None:
        super().__init__(max(int(own.max_nodes), 1))
        self._own, self._lenient = own, lenient

    def search(self) -> Pays | None:
        with self._lenient:
            pays = self._own.search()
            return None if pays is None else lambda tree, score: self._pays(pays, tree, score)
        return None

    def _pays(self, pays: Pays, tree: DraftTree, score: float) -> bool:
        with self._lenient:
            return not self._lenient.has_failed and pays(tree, score)
        return False

    def fit(self, trees: Sequence[DraftTree]) -> None:
        with self._lenient:
            self._own.fit(trees)

    def observe(self, took: StepTime, records: Sequence[StepRecord]) -> None:
        with self._lenient:
            self._own.observe(took, records)

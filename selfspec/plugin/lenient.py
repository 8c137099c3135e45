"""What a default assistant drafts with: an error of it ends drafts, and no text.

Code that knows nothing of selfspec has called the model. So if what was learned belongs to another
vocabulary, if its file is damaged, or if a budget or a shape of the user's fails, the call goes on
without drafts, with the reason in its statistics. An assistant that a call names raises the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from selfspec.cost import Budget, Step
from selfspec.draft.calibration import Calibration
from selfspec.draft.learned import Learned
from selfspec.draft.shape import Shape
from selfspec.draft.tree import TreeGrower
from selfspec.errors import one_line
from selfspec.records import DraftTree
from selfspec.stats import GenerationStats


class _NoDrafts(Budget):
    def step(self, allowed: int) -> Step:
        return Step(1)


class _NoTree(Shape):
    def grow(self, grower: TreeGrower) -> None: ...


class Lenient:
    """Calls what the drafts of one call need, as long as nothing has failed."""

    def __init__(self, stats: GenerationStats) -> None:
        self._stats = stats
        self._has_failed = False

    def learned(self, opened: Callable[[int], Learned], vocab_size: int) -> Learned:
        """What was learned, or nothing."""
        learned: Learned = self.call(opened, _nothing, vocab_size)
        if type(learned.shape) is Shape:
            return learned
        return replace(learned, shape=self.guarded(learned.shape))

    def guarded(self, value: Any) -> Any:
        """What a user has written, or what that gives, until anything has failed."""
        for base, instead in ((Budget, _NoDrafts()), (Step, Step(1)), (Shape, _NoTree())):
            if isinstance(value, base):
                return _Guarded(value, instead, self)
        return partial(self.call, value, _pays_never) if callable(value) else value

    def call(self, function: Callable[..., Any], instead: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._has_failed:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if args and getattr(args[0], "current", None) is not None:
                    raise  # A source has failed while a tree grew; the others go on.
                reason = one_line(error).partition(";")[0]
                self._stats.disable(f"its default assistant has failed ({reason})")
                self._has_failed = True
        return instead(*args, **kwargs)


class _Guarded:
    def __init__(self, value: Any, instead: Any, lenient: Lenient) -> None:
        self._value, self._instead, self._lenient = value, instead, lenient

    def __getattr__(self, name: str) -> Any:
        lenient, instead = self._lenient, getattr(self._instead, name)
        attribute = lenient.call(partial(getattr, self._value, name), lambda: instead)
        if not callable(attribute):
            return attribute
        called = partial(lenient.call, attribute, instead)
        return lambda *args, **kwargs: lenient.guarded(called(*args, **kwargs))


def _nothing(_vocab_size: int) -> Learned:
    return Learned([], Calibration(), top_k=1)


def _pays_never(_tree: DraftTree, _score: float) -> bool:
    return False

"""Lookahead decoding: a window of guesses ahead of the text, which the model answers in each step.

"Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (ICML 2024). The window
has W columns of N - 1 tokens. Column i begins i tokens ahead, with a token of the first level, and
goes on with the answers that the model gave below it in the steps before. What the model answers at
its end makes an n-gram of the column, which is kept under its first token and drafted where that
token comes. Then the window moves on: each level takes the place of the one above it.

The first level is drawn from the prompt. In our tree the first level is a chain below the root, and
each column a branch of that chain; candidates share the nodes that begin as the window does. Of all
n-grams that begin with the last token, the freshest G are verified.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

from eval.papers.self_draft import ContextCache, ContextCacheCursor, freshest_first
from selfspec.draft.calibration import FixedPrior
from selfspec.draft.shape import Shape
from selfspec.draft.tree import TreeGrower
from selfspec.records import StepRecord

_SEED = 0


class Window(Shape):
    """A shape: a tree of n-grams, and the window beside it."""

    def __init__(self, width: int = 15, length: int = 5, guesses: int = 15) -> None:
        self._width, self._length = width, length
        self._most_drafts = 1 + guesses * (length - 1)
        self.num_nodes = self._most_drafts + width * (length - 1)
        self._levels: list[list[int]] = []  # Each has a token for every column.
        self._ends: list[int] = []  # The last node of each column in the tree under way.
        self._caches: list[ContextCacheCursor] = []

    def for_row(self, prompt_ids: Sequence[int], *, learns: bool) -> Window:
        own, dice = copy.copy(self), random.Random(_SEED)
        if learns and prompt_ids:
            own._levels = [[dice.choice(prompt_ids) for _ in range(self._width)]]
        return own

    def grow(self, grower: TreeGrower) -> None:
        """The n-grams, the chain of the first level, and below it what the columns go on with."""
        self._caches = [
            cursor for cursor in grower.cursors if isinstance(cursor, ContextCacheCursor)
        ]
        grower.best_first(max_nodes=self._most_drafts)
        self._ends, spine = [], 0
        for column in zip(*self._levels, strict=True):
            nodes = [spine]
            for token in column:
                if (node := grower.add(nodes[-1], token)) is None:
                    self._ends = []  # There is no room for a window in this step.
                    return
                nodes.append(node)
            spine = nodes[1]
            self._ends.append(nodes[-1])

    def observe(self, record: StepRecord) -> None:
        """Takes the model's answers in: n-grams of full columns, and a new last level."""
        if record.top is None or len(self._ends) < self._width:
            return
        likeliest: list[int] = record.top.ids[:, 0].tolist()
        if max(self._ends) >= len(likeliest):  # A budget has cut nodes.
            return
        answers = [likeliest[node] for node in self._ends]
        if len(self._levels) == self._length - 1:
            for gram in zip(*self._levels, answers, strict=True):
                for cache in self._caches:
                    cache.keep(gram)
            self._levels = self._levels[1:]
        self._levels = [*self._levels, answers]


def lookahead(**options: Any) -> dict[str, Any]:
    """The arguments of `SelfSpec`; `options` are those of `Window`."""
    window = Window(**options)
    return {
        "sources": (),
        "extra_sources": [ContextCache()],
        "shape": window,
        "max_nodes": window.num_nodes,
        "calibration": FixedPrior(freshest_first),
    }

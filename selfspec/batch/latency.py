"""The seconds of a step of a batch, T(rows, width, context): a draft stage and a verify stage.

Each stage is linear in its rows and in its floating-point operations, as in "Efficient LLM
Inference over Heterogeneous Edge Networks with Speculative Decoding". The coefficients start from
a guess of what a further query costs and are learned from the steps that are run. Knows numbers
only: no tensors, and nothing of models.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from selfspec.errors import ConfigError

__all__ = ["Array", "Coefficients", "Latency", "Stage", "attention_horizon"]

Array = npt.NDArray[np.float64]

# A step counts half as much after some 140 others, so that a change of the machine is followed.
_FADING = 0.995
# The first steps are taken as they are. Later ones count as this many times the expected seconds at
# most, or at least, so that a slow moment of the machine does not move the whole model.
_TRUSTED = 8
_FAR = 1.25
# A fit takes some 0.1 ms, so most steps wait for others.
_REFIT_EVERY = 8
# The guess counts as this share of a step at each of these (rows, width). It never fades, and so it
# decides what the steps leave open, as where all of them had the same rows and the same width.
_GUESSED = ((1, 1), (1, 8), (4, 1), (4, 8))
_SHARE = 0.05
_SUBSETS = [list(c) for size in (3, 2, 1) for c in itertools.combinations(range(3), size)]


class Coefficients(NamedTuple):
    """What a forward of one stage costs, in seconds."""

    fixed: float  # Whatever it computes: reading the weights, above all.
    row: float  # More for each row.
    query: float  # More for each query, with no context before it.


def attention_horizon(num_weights: float, num_layers: int, hidden_size: int) -> float:
    """The context, in tokens, at which attention computes as much for a query as the weights do.

    A query takes 2 operations for each weight, and 4 · layers · hidden size for each token that it
    attends to.

    >>> round(attention_horizon(135_000_000, 30, 576))
    3906
    """
    return 2 * num_weights / (4 * num_layers * hidden_size)


class Stage:
    """The seconds of a forward by its rows, its width and the context of its longest row.

    >>> stage = Stage(Coefficients(fixed=0.010, row=0.001, query=0.002), horizon=4000)
    >>> round(1000 * float(stage.seconds(rows=4, width=2, context=1000)))
    34
    """

    def __init__(self, coefficients: Coefficients, *, horizon: float = math.inf) -> None:
        """From known coefficients; `horizon` is what `attention_horizon` says of the model."""
        if min(coefficients) < 0 or not 0 < sum(coefficients) < math.inf:
            raise ConfigError(f"coefficients must be >= 0 and not all 0 (got {coefficients})")
        if not horizon > 0:
            raise ConfigError(f"horizon must be > 0 (got {horizon})")
        self._prior = np.array(coefficients, dtype=np.float64)
        self._learned = self._prior
        self._horizon = horizon
        # Least squares of relative errors: sums of x·xᵀ and of x, where x = features / seconds.
        self._squares = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._num_steps = 0

    @classmethod
    def unknown(cls, query: float, *, horizon: float = math.inf) -> Stage:
        """A stage of which only a guess is known: what a further query costs, in plain steps.

        Its seconds are in plain steps until the first one was observed.
        """
        if not 0 < query < 1:
            raise ConfigError(f"query must be between 0 and 1 plain steps (got {query})")
        return cls(Coefficients(1 - query, 0.0, query), horizon=horizon)

    @property
    def coefficients(self) -> Coefficients:
        """What is known by now."""
        return Coefficients(*self._learned.tolist())

    def seconds(
        self, rows: float | Array, width: float | Array, context: float | Array = 0.0
    ) -> Array:
        """The seconds of a forward; arrays are taken element by element. A few µs."""
        fixed, row, query = self._learned
        work = rows * (width * (1 + np.asarray(context) / self._horizon))
        return np.asarray(fixed + row * np.asarray(rows) + query * work)

    def observe(self, rows: float, width: float, context: float, seconds: float) -> None:
        """Takes in what a real forward took; some µs, and 0.1 ms for one in eight."""
        if not 0 < seconds < math.inf:
            return
        if self._num_steps >= _TRUSTED:
            expected = float(self.seconds(rows, width, context))
            seconds = min(max(seconds, expected / _FAR), expected * _FAR)
        x = self._features(rows, width, context) / seconds
        self._squares = _FADING * self._squares + np.outer(x, x)
        self._sums = _FADING * self._sums + x
        self._num_steps += 1
        if self._num_steps < _TRUSTED or self._num_steps % _REFIT_EVERY == 0:
            self._learned = self._fitted()

    def _features(self, rows: float, width: float, context: float) -> Array:
        return np.array([1.0, rows, rows * width * (1 + context / self._horizon)])

    def _fitted(self) -> Array:
        """The coefficients that are nearest to the steps, none below 0.

        The guess knows no seconds, only shares. So it is first scaled to the steps.
        """
        scale = (self._prior @ self._sums) / (self._prior @ self._squares @ self._prior)
        squares, sums = self._squares, self._sums
        for rows, width in _GUESSED:
            features = self._features(rows, width, 0.0)
            x = features / (scale * (features @ self._prior))
            squares, sums = squares + _SHARE * np.outer(x, x), sums + _SHARE * x
        return _solved(squares, sums)


class Latency:
    """Both stages of a step.

    Without a draft stage, drafting takes no time. With `by_model`, the drafts come from a model
    that reads prompts and then takes one forward for each token of a draft; without it, one pass
    drafts all tokens of all rows, as tables do.
    """

    def __init__(
        self, verify: Stage, draft: Stage | None = None, *, by_model: bool = False
    ) -> None:
        self.verify = verify
        self.draft = draft
        self._by_model = by_model

    def draft_s(self, rows: float | Array, length: float | Array, context: float | Array) -> Array:
        """The seconds of drafting `length` tokens for each row."""
        if self.draft is None:
            return np.zeros(np.broadcast_shapes(*map(np.shape, (rows, length, context))))
        if self._by_model:
            return length * self.draft.seconds(rows, 1.0, context)
        drafting = self.draft.seconds(rows, length, 0.0)
        return np.where(np.asarray(length) > 0, drafting, 0.0)

    def verify_s(self, rows: float | Array, length: float | Array, context: float | Array) -> Array:
        """The seconds of the forward over the last token of each row and `length` drafted ones."""
        return self.verify.seconds(rows, np.asarray(length) + 1.0, context)

    def draft_reading_s(self, rows: float | Array, tokens: float | Array) -> Array:
        """The seconds in which a draft model reads prompts; none if tables draft."""
        if self.draft is None or not self._by_model:
            return np.zeros(np.broadcast_shapes(np.shape(rows), np.shape(tokens)))
        return self.draft.seconds(rows, tokens, np.asarray(tokens) / 2)

    def reading_s(self, rows: float | Array, tokens: float | Array) -> Array:
        """The seconds in which the model reads prompts of so many tokens."""
        return self.verify.seconds(rows, tokens, np.asarray(tokens) / 2)


def _solved(squares: Array, sums: Array) -> Array:
    """The least squares with no coefficient below 0: the best of all choices of those above 0."""
    best, least = np.zeros(3), math.inf
    for chosen in _SUBSETS:
        found = np.zeros(3)
        found[chosen] = np.linalg.solve(squares[np.ix_(chosen, chosen)], sums[chosen])
        error = float(found @ squares @ found - 2 * found @ sums)
        if found.min() >= 0 and error < least:
            best, least = found, error
    return best

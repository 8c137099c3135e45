"""The seconds of a step of a batch, T(rows, width, context): a draft stage and a verify stage.

Each stage is linear in its rows and in its floating-point operations, as in "Efficient LLM
Inference over Heterogeneous Edge Networks with Speculative Decoding". Knows numbers only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eval.errors import EvalError

__all__ = ["Array", "Coefficients", "Latency", "Stage", "attention_horizon"]

Array = npt.NDArray[np.float64]


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
        """`horizon` is what `attention_horizon` says of the model."""
        if min(coefficients) < 0 or not 0 < sum(coefficients) < math.inf:
            raise EvalError(f"coefficients must be >= 0 and not all 0 (got {coefficients})")
        if not horizon > 0:
            raise EvalError(f"horizon must be > 0 (got {horizon})")
        self.coefficients = coefficients
        self._horizon = horizon

    def seconds(
        self, rows: float | Array, width: float | Array, context: float | Array = 0.0
    ) -> Array:
        """The seconds of a forward; arrays are taken element by element."""
        fixed, row, query = self.coefficients
        work = rows * (width * (1 + np.asarray(context) / self._horizon))
        return np.asarray(fixed + row * np.asarray(rows) + query * work)


class Latency:
    """Both stages of a step.

    The drafts come from a model that reads prompts and then takes one forward for each token of a
    draft. Without a draft stage, drafting takes no time.
    """

    def __init__(self, verify: Stage, draft: Stage | None = None) -> None:
        self.verify = verify
        self.draft = draft

    def draft_s(self, rows: float | Array, length: float | Array, context: float | Array) -> Array:
        """The seconds of drafting `length` tokens for each row."""
        if self.draft is None:
            return np.zeros(np.broadcast_shapes(*map(np.shape, (rows, length, context))))
        return length * self.draft.seconds(rows, 1.0, context)

    def verify_s(self, rows: float | Array, length: float | Array, context: float | Array) -> Array:
        """The seconds of the forward over the last token of each row and `length` drafted ones."""
        return self.verify.seconds(rows, np.asarray(length) + 1.0, context)

    def draft_reading_s(self, rows: float | Array, tokens: float | Array) -> Array:
        """The seconds in which the draft model reads prompts."""
        if self.draft is None:
            return np.zeros(np.broadcast_shapes(np.shape(rows), np.shape(tokens)))
        return self.draft.seconds(rows, tokens, np.asarray(tokens) / 2)

    def reading_s(self, rows: float | Array, tokens: float | Array) -> Array:
        """The seconds in which the model reads prompts of so many tokens."""
        return self.verify.seconds(rows, tokens, np.asarray(tokens) / 2)

"""The noise of each step of a batch, in the order in which stock draws it."""

from __future__ import annotations

import torch

from selfspec.verify.noise import Noise, next_noise, pick_from
from selfspec.verify.shortlist import Shortlist


class NoiseTape:
    """The noise of each step of a batch, drawn as stock draws it.

    The ids and the generator's state after them are the same. Rows of a batch reach a step at
    different times, so a step's noise is drawn when the first row gets there and kept until the
    last one has used it.
    With a `generator` it is drawn from that one, else from the one that stock draws from.
    """

    def __init__(self, num_rows: int, generator: torch.Generator | None = None) -> None:
        self._num_rows = num_rows
        self._generator = generator
        self._reached = [0.0] * num_rows  # The step of each row's next token.
        self._first_kept = 0
        self._kept: list[Noise] = []

    def draw(self, scores: torch.Tensor, row: int, step: int) -> int:
        """Row `row`'s token of step `step`, out of its processed `scores` (V,)."""
        return self._taken(step, scores).pick(scores, row)

    def draw_from(self, few: Shortlist, like: torch.Tensor, row: int, step: int) -> int | None:
        """The same from a shortlist; `like` has the shape, dtype and device of stock's scores.

        None where two are so near that only `draw` can tell.
        """
        noise = self._taken(step, like)
        return few.tokens[0] if len(few.tokens) == 1 else pick_from(few, noise, row)

    def _taken(self, step: int, like: torch.Tensor) -> Noise:
        """The noise of a step, which moves the generator if no other row has taken it before."""
        while step >= self._first_kept + len(self._kept):
            self._kept.append(next_noise(self._num_rows, like, self._generator))
        return self._kept[step - self._first_kept]

    def reach(self, row: int, step: float) -> None:
        """Notes where a row is, and frees the noise of the steps that every row has passed."""
        self._reached[row] = step
        num_spent = max(min(min(self._reached) - self._first_kept, len(self._kept)), 0)
        del self._kept[: int(num_spent)]
        self._first_kept += int(num_spent)

"""The noise of each step of a batch, in the order in which stock draws it."""

from __future__ import annotations

import torch

from selfspec.verify.noise import Drawn, Noise, next_noise, pick_from
from selfspec.verify.shortlist import Shortlist

# Noise that takes more is drawn again when it is needed.
_MOST_BYTES = 1 << 26


class NoiseTape:
    """The noise of each step of a batch, drawn as stock draws it.

    The ids and the generator's state after them are the same. Rows of a batch reach a step at
    different times, so a step's noise is drawn when the first row gets there and kept until the
    last one has used it. Where the rows are far apart, only the noise of the steps that were read
    last stays in memory, and the rest is drawn again when a row gets there.
    With a `generator` it is drawn from that one, else from the one that stock draws from.
    """

    def __init__(self, num_rows: int, generator: torch.Generator | None = None) -> None:
        self._num_rows = num_rows
        self._generator = generator
        self._reached = [0.0] * num_rows  # The step of each row's next token.
        self._first_kept = 0
        self._kept: list[Noise] = []
        # By step, the one that was read last at the end, and the bytes of all of them.
        self._in_memory: dict[int, Drawn] = {}
        self._num_bytes = 0

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
            self._remember(self._first_kept + len(self._kept) - 1)
        self._remember(step)
        return self._kept[step - self._first_kept]

    def _remember(self, step: int) -> None:
        """Keeps the numbers of this step, and of those that were read last as far as they fit."""
        self._let_go(step)
        drawn = self._in_memory[step] = self._kept[step - self._first_kept].drawn
        self._num_bytes += drawn.nbytes
        while self._num_bytes > _MOST_BYTES and len(self._in_memory) > 1:
            oldest = next(iter(self._in_memory))
            self._in_memory[oldest].forget()
            self._let_go(oldest)

    def _let_go(self, step: int) -> None:
        if (drawn := self._in_memory.pop(step, None)) is not None:
            self._num_bytes -= drawn.nbytes

    def reach(self, row: int, step: float) -> None:
        """Notes where a row is, and frees the noise of the steps that every row has passed."""
        self._reached[row] = step
        num_spent = int(max(min(min(self._reached) - self._first_kept, len(self._kept)), 0))
        for spent in range(self._first_kept, self._first_kept + num_spent):
            self._let_go(spent)
        del self._kept[:num_spent]
        self._first_kept += num_spent

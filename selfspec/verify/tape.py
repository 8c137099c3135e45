"""The noise of the new tokens of a batch, in the order in which stock draws it."""

from __future__ import annotations

import torch

from selfspec.verify.noise import Drawn, Noise, next_noise, pick_from
from selfspec.verify.shortlist import Shortlist

# Noise that takes more is drawn again when it is needed.
_MOST_BYTES = 1 << 26


class NoiseTape:
    """The noise of the new tokens of a batch, drawn as stock draws it: for all rows at once.

    The ids and the generator's state after them are the same. `index` is a token's place among the
    new ones of its row. Rows reach it at different times, so its noise is drawn when the first row
    gets there and kept until the last one has used it. Where the rows are far apart, only the noise
    that was read last stays in memory, and the rest is drawn again when a row gets there.
    With a `generator` it is drawn from that one, else from the one that stock draws from.
    """

    def __init__(self, num_rows: int, generator: torch.Generator | None = None) -> None:
        self._num_rows = num_rows
        self._generator = generator
        self._reached = [0.0] * num_rows  # The index of each row's next token.
        self._first_kept = 0
        self._kept: list[Noise] = []
        # By index, the one that was read last at the end, and the bytes of all of them.
        self._in_memory: dict[int, Drawn] = {}
        self._num_bytes = 0

    def draw(self, scores: torch.Tensor, row: int, index: int) -> int:
        """Row `row`'s token `index`, out of its processed `scores` (V,)."""
        return self._taken(index, scores).pick(scores, row)

    def draw_from(self, few: Shortlist, like: torch.Tensor, row: int, index: int) -> int | None:
        """The same from a shortlist; `like` has the shape, dtype and device of stock's scores.

        None where two are so near that only `draw` can tell.
        """
        noise = self._taken(index, like)
        return few.tokens[0] if len(few.tokens) == 1 else pick_from(few, noise, row)

    def _taken(self, index: int, like: torch.Tensor) -> Noise:
        """The noise of a token, which moves the generator if no other row has taken it before."""
        while index >= self._first_kept + len(self._kept):
            self._kept.append(next_noise(self._num_rows, like, self._generator))
            self._remember(self._first_kept + len(self._kept) - 1)
        self._remember(index)
        return self._kept[index - self._first_kept]

    def _remember(self, index: int) -> None:
        """Keeps the numbers of this token, and of those that were read last as far as they fit."""
        self._let_go(index)
        drawn = self._in_memory[index] = self._kept[index - self._first_kept].drawn
        self._num_bytes += drawn.nbytes
        while self._num_bytes > _MOST_BYTES and len(self._in_memory) > 1:
            oldest = next(iter(self._in_memory))
            self._in_memory[oldest].forget()
            self._let_go(oldest)

    def _let_go(self, index: int) -> None:
        if (drawn := self._in_memory.pop(index, None)) is not None:
            self._num_bytes -= drawn.nbytes

    def reach(self, row: int, index: float) -> None:
        """Notes where a row is, and frees the noise of the tokens that every row has."""
        self._reached[row] = index
        num_spent = int(max(min(min(self._reached) - self._first_kept, len(self._kept)), 0))
        for spent in range(self._first_kept, self._first_kept + num_spent):
            self._let_go(spent)
        del self._kept[:num_spent]
        self._first_kept += num_spent

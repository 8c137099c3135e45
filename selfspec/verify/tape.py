"""The noise of the new tokens of a batch, in the order in which stock draws it."""

from __future__ import annotations

import torch

from selfspec.verify.noise import Noise, next_noise, pick_from
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
        self._reached = [0.0] * num_rows  # The index of the next token of every row.
        self._num_drawn = 0
        self._noise: dict[int, Noise] = {}  # By index, the one that was read last at the end.

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
        while index >= self._num_drawn:
            self._noise[self._num_drawn] = next_noise(self._num_rows, like, self._generator)
            self._num_drawn += 1
        noise = self._noise[index] = self._noise.pop(index)
        num_in_memory = max(_MOST_BYTES // noise.drawn.nbytes, 1)
        for older in list(self._noise.values())[:-num_in_memory]:
            older.drawn.forget()
        return noise

    def reach(self, row: int, index: float) -> None:
        """Notes where a row is, and frees the noise of the tokens that every row has."""
        self._reached[row] = index
        first_needed = min(self._reached)
        self._noise = {index: it for index, it in self._noise.items() if index >= first_needed}

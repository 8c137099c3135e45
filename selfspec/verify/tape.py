"""The noise of the new tokens of a batch, in the order in which transformers draws it."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from selfspec.machine.device import default_generator
from selfspec.records import Draws, Likely, NoiseOf
from selfspec.verify.noise import Noise, next_noise, pick_from, rivals
from selfspec.verify.shortlist import Shortlist, Tokens, Warpers, Weights, shortlist

# Noise that takes more is drawn again when it is needed.
_MOST_BYTES = 1 << 26
# Noise is peeked for at most this many tokens to come.
_FARTHEST = 8
_TINY = 1e-30  # Noise may be 0.


class _Peeked(NamedTuple):
    """Noise to come, and the generator's state before and after it."""

    noise: Noise
    before: torch.Tensor
    after: torch.Tensor


class NoiseTape:
    """The noise of the new tokens of a batch, drawn as transformers draws it: for all rows at once.

    The ids and the generator's state after them are the same. `index` is a token's place among the
    new ones of its row. Rows reach it at different times, so its noise is drawn when the first row
    gets there and kept until the last one has used it. Where the rows are far apart, only the noise
    that was read last stays in memory, and the rest is drawn again when a row gets there.
    With a `generator` it is drawn from that one, else from the one that transformers draws from.

    Drafts may `peek` at noise to come, which is drawn from a copy of the generator. It becomes true
    only if the generator still stands where the copy began when the noise is needed. If somebody
    else has drawn from the generator until then, nothing is peeked any more.
    """

    def __init__(self, num_rows: int, generator: torch.Generator | None = None) -> None:
        self._num_rows = num_rows
        self._generator = generator
        self._reached = [0.0] * num_rows  # The index of the next token of every row.
        self._num_drawn = 0
        self._noise: dict[int, Noise] = {}  # By token index, in the order of reading.
        self._like: torch.Tensor | None = None  # Has the shape and dtype of scores.
        self._farthest = 0  # Noise is peeked for this many tokens; only after the first one.
        self._peeked: list[_Peeked] = []  # The noise after the last that was drawn.

    def draw(self, scores: torch.Tensor, row: int, index: int) -> int:
        """Row `row`'s token `index`, out of its processed `scores` (V,)."""
        return self._taken(index, scores).pick(scores, row)

    def draw_from(self, few: Shortlist, like: torch.Tensor, row: int, index: int) -> int | None:
        """The same from a shortlist; `like` is like the scores, in shape, dtype and device.

        None where two are so near that only `draw` can tell.
        """
        noise = self._taken(index, like)
        return few.tokens[0] if len(few.tokens) == 1 else pick_from(few, noise, row)

    def peek(self, row: int, depth: int) -> Noise | None:
        """The noise of the row's token `depth` after its next one; None where nobody knows.

        Noise of tokens is drawn once: what is peeked here is handed out by `draw`.
        """
        index = self._reached[row] + depth
        if index < self._num_drawn:  # Another row has been there.
            return self._noise.get(int(index))
        num_ahead = index - self._num_drawn
        if num_ahead >= self._farthest:
            return None
        while num_ahead >= len(self._peeked):
            self._peek_on()
        return self._peeked[int(num_ahead)].noise

    def _peek_on(self) -> None:
        assert self._like is not None
        before = self._peeked[-1].after if self._peeked else self._source().get_state()
        copy = torch.Generator("cpu").set_state(before)
        noise = next_noise(self._num_rows, self._like, copy)
        self._peeked.append(_Peeked(noise, before, copy.get_state()))

    def _is_where_peeked(self) -> bool:
        """Does the generator stand where peeking began? If not, nothing is peeked any more."""
        if not torch.equal(self._source().get_state(), self._peeked[0].before):
            self._peeked, self._farthest = [], 0
        return bool(self._peeked)

    def _is_like(self, like: torch.Tensor) -> bool:
        """Are scores as those for which noise was peeked? A user's processor may change them."""
        assert self._like is not None
        form = like.device, like.dtype, like.shape[-1]
        return form == (self._like.device, self._like.dtype, self._like.shape[-1])

    def _source(self) -> torch.Generator:
        return self._generator or default_generator(torch.device("cpu"))

    def _taken(self, index: int, like: torch.Tensor) -> Noise:
        """The noise of a token, which moves the generator if no other row has taken it before."""
        while index >= self._num_drawn:
            self._noise[self._num_drawn] = self._next(like)
            self._num_drawn += 1
        noise = self._noise[index] = self._noise.pop(index)
        num_in_memory = max(_MOST_BYTES // noise.drawn.nbytes, 1)
        for older in list(self._noise.values())[:-num_in_memory]:
            older.drawn.forget()
        return noise

    def _next(self, like: torch.Tensor) -> Noise:
        """The next noise of the generator: what was peeked, if that is what would be drawn.

        Another thread could draw from a generator that everybody uses between a look at its state
        and the change of it. Then the noise is drawn once more.
        """
        if self._peeked and not self._is_like(like):
            self._peeked, self._farthest = [], 0
        if not self._peeked or not self._is_where_peeked():
            noise = next_noise(self._num_rows, like, self._generator)
            if not self._num_drawn and like.device.type == "cpu":
                self._like = like.new_empty(1).expand(like.shape[-1])
                self._farthest = min(_FARTHEST, _MOST_BYTES // noise.drawn.nbytes)
            return noise
        peeked = self._peeked.pop(0)
        if self._generator is None and threading.active_count() > 1:
            return next_noise(self._num_rows, like)
        self._source().set_state(peeked.after)
        return peeked.noise

    def reach(self, row: int, index: float) -> None:
        """Notes where a row is, and frees the noise of the tokens that every row has."""
        self._reached[row] = index
        first_needed = min(self._reached)
        self._noise = {index: it for index, it in self._noise.items() if index >= first_needed}


class RowDraws(Draws):
    """How one row's next tokens will be drawn, by the tape and by warpers that look at no text."""

    def __init__(self, tape: NoiseTape, row: int, warpers: Warpers) -> None:
        self._tape, self._row, self._warpers = tape, row, warpers
        self.temperature = warpers.temperature or 1.0

    def noise(self, depth: int) -> NoiseOf | None:
        noise = self._tape.peek(self._row, depth)
        return None if noise is None else noise.of(self._row)

    def noise_of(self, ids: Tokens, depth: int) -> Weights | None:
        noise = self._tape.peek(self._row, depth)
        return None if noise is None else noise.of_many(ids, self._row)

    def ranked(self, logits: torch.Tensor, depth: int) -> Likely | None:
        noise = self._tape.peek(self._row, depth)
        few = None if noise is None else shortlist(logits.float().cpu(), self._warpers)
        if noise is None or few is None:
            return None
        noise_of, pairs = noise.of(self._row), zip(few.tokens, few.weights, strict=True)
        ratios = {token: weight / max(noise_of(token), _TINY) for token, weight in pairs}
        if few.rest is not None:  # Tokens not listed here win where their noise is close to 0.
            ratios |= rivals(few, max(ratios.values()), noise, self._row)
        return sorted(ratios.items(), key=lambda pair: -pair[1])

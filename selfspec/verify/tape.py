"""The noise of each step of a batch, in the order in which stock draws it.

Noise may be looked at before its step comes, without any effect on what is drawn.
"""

from __future__ import annotations

import torch

from selfspec.machine.device import default_generator
from selfspec.records import NoiseOf
from selfspec.verify.noise import Noise, next_noise, pick_from
from selfspec.verify.shortlist import Shortlist

__all__ = ["NoiseTape"]

# Noise is read at most this many steps ahead of the text, and this many numbers: it takes memory.
_FARTHEST = 16
_MOST_NUMBERS = 1 << 22


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
        self._like: torch.Tensor | None = None  # Scores that say what noise is drawn for.
        self._foresight: _Foresight | None = None

    def draw(self, scores: torch.Tensor, row: int, step: int) -> int:
        """Row `row`'s token of step `step`, out of its processed `scores` (V,)."""
        return self._taken(step, scores).pick(scores, row)

    def draw_from(self, few: Shortlist, like: torch.Tensor, row: int, step: int) -> int | None:
        """The same out of all that may be drawn, where stock's scores would be `like` others.

        None where two are so near that only `draw` can tell.
        """
        noise = self._taken(step, like)
        return few.tokens[0] if len(few.tokens) == 1 else pick_from(few, noise, row)

    def ahead(self, row: int, step: int) -> NoiseOf | None:
        """The noise of each token of a step that may be yet to come; leaves the generator alone.

        None where it can't be told: before the first token was drawn, too far ahead, or where
        each look at a number would make a GPU wait.
        """
        like, index = self._like, step - self._first_kept
        if like is None or like.device.type != "cpu" or index < 0:
            return None
        if index < len(self._kept):
            return self._kept[index].of(row)
        noise = self._ahead(like).noise(index - len(self._kept), self._num_rows, like)
        return None if noise is None else noise.of(row)

    def _taken(self, step: int, like: torch.Tensor) -> Noise:
        """The noise of a step, which moves the generator if no other row has taken it before."""
        while step >= self._first_kept + len(self._kept):
            foreseen = self._ahead(like).come_true(like)
            self._like = like.new_empty(0, like.shape[-1])
            self._kept.append(foreseen or next_noise(self._num_rows, like, self._generator))
        return self._kept[step - self._first_kept]

    def _ahead(self, like: torch.Tensor) -> _Foresight:
        if self._foresight is None:
            self._foresight = _Foresight(self._generator or default_generator(like.device))
        return self._foresight

    def reach(self, row: int, step: float) -> None:
        """Notes where a row is, and frees the noise of the steps that every row has passed."""
        self._reached[row] = step
        num_spent = max(min(min(self._reached) - self._first_kept, len(self._kept)), 0)
        del self._kept[: int(num_spent)]
        self._first_kept += int(num_spent)


class _Foresight:
    """Noise that was drawn before its time, from a twin of a generator.

    The generator itself moves only when a step comes true, for scores such as were expected, and
    only if nobody else has drawn from it or seeded it in the meantime. Otherwise what was foreseen
    is thrown away.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._twin = torch.Generator(generator.device)
        self._foreseen: list[Noise] = []
        self._states: list[torch.Tensor] = []  # Before each of them, and after the last.
        self._kind: tuple[object, ...] = ()  # Of the scores that it was drawn for.

    def noise(self, index: int, num_rows: int, like: torch.Tensor) -> Noise | None:
        """The noise of the step after `index` others that are yet to come; None if too far."""
        if index >= _FARTHEST or (index + 1) * num_rows * like.shape[-1] > _MOST_NUMBERS:
            return None
        if not self._states:
            self._states.append(self._generator.get_state())
            self._twin.set_state(self._states[0])
            self._kind = _kind_of(like)
        while index >= len(self._foreseen):
            self._foreseen.append(next_noise(num_rows, like, self._twin))
            self._states.append(self._twin.get_state())
        return self._foreseen[index]

    def come_true(self, like: torch.Tensor) -> Noise | None:
        """Moves stock's generator by one step and gives its noise, if that was foreseen."""
        if not self._foreseen or not self._is_as_foreseen(like):
            self._foreseen.clear()
            self._states.clear()  # The generator moves on without it.
            return None
        del self._states[0]
        self._generator.set_state(self._states[0])
        return self._foreseen.pop(0)

    def _is_as_foreseen(self, like: torch.Tensor) -> bool:
        state = self._generator.get_state()
        return self._kind == _kind_of(like) and torch.equal(self._states[0], state)


def _kind_of(scores: torch.Tensor) -> tuple[object, ...]:
    """All that decides how many random numbers are drawn for scores, and from which generator."""
    return scores.device, scores.dtype, scores.shape[-1]

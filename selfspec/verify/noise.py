"""The random numbers that sampling takes: drawn as stock draws them, read only where they matter.

`torch.multinomial(p, 1)` is `(p / q).argmax(-1)` with `q` exponential noise of p's shape. To draw
`q` takes a CPU longer than all the rest of a token's sampling, most of it for logarithms, and all
but a few tokens have a p of 0 or next to it. So there only the uniform numbers are drawn that the
noise is made from, which moves the generator just as far, and logarithms are taken for the tokens
that may win: those on a shortlist, and those beside it whose number is next to nothing. This
rounds otherwise than stock; where the two best are so near that it could matter, the noise is
made as stock makes it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Protocol

import numpy as np
import torch

from selfspec.machine.device import default_generator
from selfspec.records import NoiseOf
from selfspec.verify.shortlist import Shortlist, Tokens, Warpers, Weights, shortlist

__all__ = ["Noise", "NoiseTape", "highest_ratios"]

_AS_THEY_ARE = Warpers()
# Noise is read so many steps ahead of the text at most, and so many numbers, since it takes memory.
_FARTHEST = 16
_MOST_NUMBERS = 1 << 22
# Rounding, stock's and ours, moves what is compared by some 1e-6 at most.
_CLEARLY = 1 + 1e-4


class NoiseTape:
    """The noise of each step of a batch, drawn as stock draws it.

    Same ids, same generator state behind them. Rows of a batch reach a step at different times, so
    a step's noise is drawn when the first row gets there and kept until the last one has used it.
    With a `generator` it is drawn from that one, else from the one that stock draws from.
    """

    def __init__(self, num_rows: int, generator: torch.Generator | None = None) -> None:
        self._num_rows = num_rows
        self._generator = generator
        self._first_kept = 0
        self._kept: list[Noise] = []
        self._like: torch.Tensor | None = None  # Scores that say what noise is drawn for.
        self._foresight: _Foresight | None = None

    def draw(self, scores: torch.Tensor, row: int, step: int) -> int:
        """Row `row`'s token of step `step`, out of its processed `scores` (V,)."""
        return self.taken(step, scores).pick(scores, row)

    def draw_from(self, few: Shortlist, like: torch.Tensor, row: int, step: int) -> int | None:
        """The same out of all that may be drawn, where stock's scores would be `like` others.

        None where two are so near that only `draw` can tell.
        """
        noise = self.taken(step, like)
        return few.tokens[0] if len(few.tokens) == 1 else _pick_from(few, noise, row)

    def ahead(self, row: int, step: int) -> NoiseOf | None:
        """The noise of each token of a step that may be yet to come; leaves the generator alone.

        None where it can't be told: before the first token was drawn, too far ahead, or where
        each look at a number would make a GPU wait.
        """
        if self._like is None or self._like.device.type != "cpu" or step < self._first_kept:
            return None
        noise = self.foreseen(step, self._like)
        return None if noise is None else noise.of(row)

    def foreseen(self, step: int, like: torch.Tensor) -> Noise | None:
        """The noise of a step for scores `like` some; None if it is too far ahead.

        `taken` says whether it has come true.
        """
        index = step - self._first_kept
        if index < len(self._kept):
            return self._kept[index]
        return self._ahead(like).noise(index - len(self._kept), self._num_rows, like)

    def taken(self, step: int, like: torch.Tensor) -> Noise:
        """The noise of a step, which moves the generator if no other row has taken it before."""
        while step >= self._first_kept + len(self._kept):
            foreseen = self._ahead(like).come_true(like)
            self._like = like.new_empty(0, like.shape[-1])
            self._kept.append(foreseen or _next_noise(self._num_rows, like, self._generator))
        return self._kept[step - self._first_kept]

    def _ahead(self, like: torch.Tensor) -> _Foresight:
        if self._foresight is None:
            self._foresight = _Foresight(self._generator or default_generator(like.device))
        return self._foresight

    def forget_before(self, step: int) -> None:
        """Frees the noise of the steps that every row has behind it."""
        num_spent = max(min(step - self._first_kept, len(self._kept)), 0)
        del self._kept[:num_spent]
        self._first_kept += num_spent


class Noise(Protocol):
    """One step's noise, for all rows."""

    def pick(self, scores: torch.Tensor, row: int) -> int:
        """The token that stock would draw for a row out of its scores (V,)."""
        ...

    def least(self, row: int) -> float:
        """A number that none of a row's is below."""
        ...

    def of(self, row: int) -> NoiseOf:
        """The noise of one token after the other, on a CPU."""
        ...

    def of_all(self, row: int) -> torch.Tensor:
        """(V,): the noise of all tokens, on the device where it is drawn."""
        ...

    def up_to(self, limit: float, row: int) -> tuple[Tokens, Weights]:
        """At least all tokens whose noise is not above a limit, and their noise, on a CPU."""
        ...


def _next_noise(
    num_rows: int, like: torch.Tensor, generator: torch.Generator | None = None
) -> Noise:
    """The next noise of a generator; of the one that stock draws from if none is given."""
    shape = (num_rows, like.shape[-1])
    if like.device.type == "cpu" and like.dtype == torch.float32 and _is_made_of_uniforms():
        return _Uniforms(shape, generator or torch.default_generator)
    return _Exponentials(like.new_empty(shape).exponential_(1, generator=generator))


def highest_ratios(scores: torch.Tensor, noises: torch.Tensor) -> torch.Tensor:
    """(2, N): the highest ratio of each row of scores (N, V) to noises (N, V), and whose it is.

    That token is drawn as `torch.multinomial` would draw it. Waits for nothing.
    """
    ratios = scores.softmax(-1) / noises
    return torch.stack([each.double() for each in ratios.max(-1)])


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
        self._states: list[torch.Tensor] = []  # Before each of them, and behind the last.
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
            self._foreseen.append(_next_noise(num_rows, like, self._twin))
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


class _Exponentials:
    """The noise itself."""

    def __init__(self, noise: torch.Tensor) -> None:
        self._noise = noise  # (B, V)

    def pick(self, scores: torch.Tensor, row: int) -> int:
        """As `torch.multinomial` does it."""
        ((best,), (token,)) = highest_ratios(scores[None], self._noise[row, None]).tolist()
        if math.isnan(best):  # A NaN wins, and stock raises just this error.
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return int(token)

    def least(self, row: int) -> float:
        """The smallest number of the row."""
        return self._noise[row].min().item()

    def of(self, row: int) -> NoiseOf:
        """Looks the numbers up."""
        noise = self._noise[row]
        return lambda token: noise[token].item()

    def of_all(self, row: int) -> torch.Tensor:
        """A view."""
        return self._noise[row]

    def up_to(self, limit: float, row: int) -> tuple[Tokens, Weights]:
        """Finds them by one comparison over the row."""
        noise = self._noise[row]
        tokens = (noise <= limit).nonzero()[:, 0]
        return tokens.numpy(), noise[tokens].double().numpy()


class _Uniforms:
    """What the noise is made from, and the generator's state before it was drawn."""

    def __init__(self, shape: tuple[int, int], generator: torch.Generator) -> None:
        self._shape = shape
        self._state = generator.get_state()
        values = torch.empty(shape, dtype=torch.float64, device="cpu")
        self._values = values.uniform_(generator=generator)

    def pick(self, scores: torch.Tensor, row: int) -> int:
        """By way of a shortlist, and as stock does it where the shortlist can't tell."""
        few = shortlist(scores, _AS_THEY_ARE)
        token = None if few is None else _pick_from(few, self, row)
        return self._made().pick(scores, row) if token is None else token

    def least(self, row: int) -> float:
        """The noise of the row's least uniform number."""
        return -math.log1p(-self._values[row].min().item())

    def of(self, row: int) -> NoiseOf:
        """Makes the noise in plain Python, which is faster than arrays for a few tokens."""
        values = self._values[row].numpy().data  # A view that Python reads faster than an array.
        return lambda token: -math.log(1 - values[token])

    def of_all(self, row: int) -> torch.Tensor:
        """Makes the noise as stock does."""
        return self._made().of_all(row)

    def up_to(self, limit: float, row: int) -> tuple[Tokens, Weights]:
        """Makes the noise only of tokens whose uniform number is small enough."""
        most = -math.expm1(-limit) * _CLEARLY
        numbers = self._values[row].numpy()
        tokens = np.flatnonzero(numbers <= most)
        return tokens, np.abs(np.log(1 - numbers[tokens]))

    def _made(self) -> _Exponentials:
        generator = torch.Generator("cpu").set_state(self._state)
        noise = torch.empty(self._shape, dtype=torch.float32, device="cpu")
        return _Exponentials(noise.exponential_(1, generator=generator))


def _pick_from(few: Shortlist, noise: Noise, row: int) -> int | None:
    """The token that stock would draw, out of a shortlist; None where it is not sure.

    Likeliest first, up to where not even the least noise of all could help a token.
    """
    least = noise.least(row)
    if not least > 0:
        return None
    noise_of, most = noise.of(row), _CLEARLY / least
    tokens: list[int] = []
    ratios: list[float] = []
    best = 0.0
    for token, weight in zip(few.tokens, few.weights, strict=True):
        if weight * most < best:
            return _clearly_best(tokens, ratios)
        tokens.append(token)
        ratios.append(weight / (noise_of(token) or least))
        best = max(best, ratios[-1])
    if few.rest is not None and few.weights[-1] * most >= best:
        rivals = _rivals(few, best, noise, row)
        tokens, ratios = tokens + list(rivals), ratios + list(rivals.values())
    return _clearly_best(tokens, ratios)


def _rivals(few: Shortlist, best: float, noise: Noise, row: int) -> dict[int, float]:
    """The two highest ratios of the rest, of those that come near to the best one.

    Their weights are small, so their noise must be smaller still.
    """
    assert few.rest is not None
    tokens, theirs = noise.up_to(few.weights[-1] / best * _CLEARLY, row)
    if not len(tokens):
        return {}
    beside = ~np.isin(tokens, few.tokens)
    tokens, theirs = tokens[beside], theirs[beside]
    ratios = few.rest(tokens) / theirs
    highest = np.argsort(ratios)[-2:]
    return dict(zip(tokens[highest].tolist(), ratios[highest].tolist(), strict=True))


def _clearly_best(tokens: list[int], ratios: list[float]) -> int | None:
    """The token with the highest ratio, if no other is nearly as high."""
    best = max(ratios)
    index = ratios.index(best)
    second = max(ratios[:index] + ratios[index + 1 :], default=0.0)
    return tokens[index] if best > second * _CLEARLY else None


@cache
def _is_made_of_uniforms() -> bool:
    """Does this torch make exponential noise of one double in [0, 1) for each number?

    Some builds draw it otherwise, as those that leave it to MKL; they are taken as they are.
    """
    stock, ours = (torch.Generator("cpu").manual_seed(0) for _ in range(2))
    noise = torch.empty(2, 1024, dtype=torch.float32, device="cpu")
    uniforms = torch.empty(2, 1024, dtype=torch.float64, device="cpu")
    noise.exponential_(1, generator=stock)
    expected = -torch.log1p(-uniforms.uniform_(generator=ours))
    same_way = torch.equal(stock.get_state(), ours.get_state())
    return same_way and torch.allclose(noise.double(), expected, rtol=1e-6, atol=0)

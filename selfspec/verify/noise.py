"""The random numbers that sampling takes, drawn as transformers draws them.

`torch.multinomial(p, 1)` is `(p / q).argmax(-1)` with `q` exponential noise of p's shape. On a CPU,
drawing `q` takes longer than the rest of a token's sampling, mostly for logarithms, although all
but a few tokens have a p near 0. So on a CPU only the uniform numbers are drawn, from which the
noise is made. This advances the generator equally. Logarithms are taken for possible winners only:
tokens on a shortlist, and others whose uniform number is near 0. This rounds differently from
transformers. If the two best are so near that it could matter, the noise is made as transformers
makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from selfspec.machine.device import default_generator
from selfspec.records import NoiseOf
from selfspec.verify.shortlist import Shortlist, Tokens, Warpers, Weights, shortlist

_Source = torch.Generator | None

_AS_THEY_ARE = Warpers()
# Rounding, here and in transformers, changes a ratio by about 1e-6 at most.
_CLEARLY = 1 + 1e-4


def next_noise(
    num_rows: int, like: torch.Tensor, generator: torch.Generator | None = None
) -> Noise:
    """The next noise of a generator; without one, of the one that transformers draws from."""
    shape, dtype, device = (num_rows, like.shape[-1]), like.dtype, like.device
    if generator is None and device.type in ("cpu", "cuda"):
        generator = default_generator(device)
    if device.type == "cpu" and dtype == torch.float32 and _is_made_of_uniforms():
        return _Uniforms(shape, generator)

    def draw(source: _Source) -> torch.Tensor:  # Holds no scores.
        return torch.empty(shape, dtype=dtype, device=device).exponential_(generator=source)

    return _Exponentials(Drawn(draw, generator))


class Drawn:
    """Random numbers of a generator, which may be forgotten: they are drawn again then.

    Without a generator, they are those of a device whose generator nobody knows, and are kept.
    """

    def __init__(self, draw: Callable[[_Source], torch.Tensor], generator: _Source) -> None:
        self.state = None if generator is None else generator.get_state()  # before it drew
        self._draw = draw
        self._numbers: torch.Tensor | None = draw(generator)  # (B, V)
        self._device, self.nbytes = self._numbers.device, self._numbers.nbytes

    @property
    def numbers(self) -> torch.Tensor:
        if self._numbers is None:
            self._numbers = self._draw(self.generator())
        return self._numbers

    def generator(self) -> torch.Generator:
        """A generator that draws the same numbers next."""
        assert self.state is not None
        return torch.Generator(self._device).set_state(self.state)

    def forget(self) -> None:
        if self.state is not None:
            self._numbers = None


class _Exponentials:
    """One step's noise for all rows, drawn as exponentials."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn

    def pick(self, scores: torch.Tensor, row: int) -> int:
        """The token that transformers would draw for a row out of its scores (V,)."""
        ratios = (scores.softmax(-1) / self.drawn.numbers[row]).max(-1)
        # Both in one copy, since a copy waits for the device: as floats, which hold every id
        # below 2**24. Not every device has doubles.
        best, token = torch.stack([part.float() for part in ratios]).tolist()
        if math.isnan(best):  # A NaN wins, and transformers raises just this error.
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return int(token)

    def least(self, row: int) -> float:
        """No token of the row has less noise than this."""
        return self.drawn.numbers[row].min().item()

    def of(self, row: int) -> NoiseOf:
        """A function that gives the noise of a token, on a CPU."""
        # A view that Python reads faster than an array.
        return self.drawn.numbers[row].numpy().data.__getitem__

    def of_many(self, ids: Tokens, row: int) -> Weights:
        """The noise of some tokens, on a CPU."""
        return self.drawn.numbers[row].numpy()[ids].astype(np.float64)

    def up_to(self, limit: float, row: int) -> tuple[Tokens, Weights]:
        """At least all tokens whose noise is not above a limit, and their noise, on a CPU."""
        noise = self.drawn.numbers[row]
        tokens = (noise <= limit).nonzero()[:, 0]
        return tokens.numpy(), noise[tokens].double().numpy()


class _Uniforms:
    """The uniform numbers that noise is made from."""

    def __init__(self, shape: tuple[int, int], generator: _Source) -> None:
        self._shape = shape
        self.drawn = Drawn(
            lambda source: self._empty(torch.float64).uniform_(generator=source), generator
        )

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._shape, dtype=dtype, device="cpu")

    def pick(self, scores: torch.Tensor, row: int) -> int:
        """Looks at a shortlist first, and makes all noise only if that is not clear."""
        few = shortlist(scores, _AS_THEY_ARE)
        token = None if few is None else pick_from(few, self, row)
        return self._made().pick(scores, row) if token is None else token

    def least(self, row: int) -> float:
        return -math.log1p(-self.drawn.numbers[row].min().item())

    def of(self, row: int) -> NoiseOf:
        """Computes noise in plain Python, which is faster than arrays for a few tokens."""
        # A view that Python reads faster than an array.
        values = self.drawn.numbers[row].numpy().data
        return lambda token: -math.log(1 - values[token])

    def of_many(self, ids: Tokens, row: int) -> Weights:
        noise: Weights = -np.log1p(-self.drawn.numbers[row].numpy()[ids])
        return noise

    def up_to(self, limit: float, row: int) -> tuple[Tokens, Weights]:
        """Takes logarithms only for tokens whose uniform number is small enough."""
        most = -math.expm1(-limit) * _CLEARLY
        numbers = self.drawn.numbers[row].numpy()
        tokens = np.flatnonzero(numbers <= most)
        return tokens, np.abs(np.log(1 - numbers[tokens]))

    def _made(self) -> _Exponentials:
        noise, same = self._empty(torch.float32), self.drawn.generator()
        return _Exponentials(Drawn(lambda source: noise.exponential_(generator=source), same))


Noise = _Exponentials | _Uniforms


def pick_from(few: Shortlist, noise: Noise, row: int) -> int | None:
    """The token that transformers would draw, out of a shortlist; None if that is not clear.

    Goes down from the likeliest token, until not even the least noise could make one win.
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
        others = rivals(few, best, noise, row)
        tokens, ratios = tokens + list(others), ratios + list(others.values())
    return _clearly_best(tokens, ratios)


def rivals(few: Shortlist, best: float, noise: Noise, row: int) -> dict[int, float]:
    """The two highest ratios among the tokens that are not on the shortlist but could win.

    Their weights are at most the shortlist's last one, so only tiny noise lets them win.
    """
    assert few.rest is not None
    tokens, theirs = noise.up_to(few.weights[-1] / best * _CLEARLY, row)
    if not len(tokens):
        return {}
    others = ~np.isin(tokens, few.tokens)
    tokens, theirs = tokens[others], theirs[others]
    ratios = few.rest(tokens) / theirs
    highest = np.argsort(ratios)[-2:]
    return dict(zip(tokens[highest].tolist(), ratios[highest].tolist(), strict=True))


def _clearly_best(tokens: list[int], ratios: list[float]) -> int | None:
    """The token with the highest ratio; None if the second one is within 0.01 %."""
    best = max(ratios)
    index = ratios.index(best)
    second = max(ratios[:index] + ratios[index + 1 :], default=0.0)
    return tokens[index] if best > second * _CLEARLY else None


@cache
def _is_made_of_uniforms() -> bool:
    """Is every number of exponential noise made of one double in [0, 1) by this torch?

    Some builds draw it differently, such as those that use MKL. There the noise is drawn whole.
    """
    theirs, ours = (torch.Generator("cpu").manual_seed(0) for _ in range(2))
    noise = torch.empty(2, 1024, dtype=torch.float32, device="cpu")
    uniforms = torch.empty(2, 1024, dtype=torch.float64, device="cpu")
    noise.exponential_(1, generator=theirs)
    expected = -torch.log1p(-uniforms.uniform_(generator=ours))
    same_way = torch.equal(theirs.get_state(), ours.get_state())
    return same_way and torch.allclose(noise.double(), expected, rtol=1e-6, atol=0)

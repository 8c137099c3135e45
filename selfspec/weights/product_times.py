"""What products with a model's weights take, as they are and packed: a few of them, timed.

Knows weights and formats; not when to time, nor what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch

from selfspec.weights.formats import formats_for, own_linear, pack

_PLAIN, WIDE = 1, 8  # Tokens of a plain step, and of a step with drafts: both are timed.
# This many weights are timed. They leave the CPU's cache before they are used again.
SAMPLE = 1 << 23
_PART = SAMPLE // 8  # At most this many of one layer, so that several shapes are among them.
_ROUNDS = 3
# Packing pays if it cuts the time of products by at least 10 %.
_PAYS = 0.9
# In place it pays only if a single token takes at most 25 % longer, since stock computes from
# packed weights, too. In bfloat16 under AVX2 it took 24 % longer, and eight tokens a fifth.
_IN_PLACE = 1.25

_Product = Callable[[torch.Tensor], object]


class ProductTimes(NamedTuple):
    """Seconds of products for each weight: with one token and with eight."""

    plain: tuple[float, float]  # as torch computes them
    packing_format: str | None = None  # the fastest one; None if none is 10 % faster
    packed: tuple[float, float] = (0.0, 0.0)  # in that format
    packing: float = 0.0  # to pack

    @property
    def least_tokens(self) -> int:
        """From how many tokens on a copy is faster than its weight."""
        return 1 if self.packed[0] <= self.plain[0] else 2

    @property
    def suits_in_place(self) -> bool:
        """Is a single token fast enough without the weight itself?"""
        return self.packed[0] <= _IN_PLACE * self.plain[0]

    @property
    def saved(self) -> float:
        """What a forward saves: the mean of one with a token and one with eight."""
        return (
            sum(max(plain - new, 0.0) for plain, new in zip(self.plain, self.packed, strict=True))
            / 2
        )


def product_times(weights: Sequence[torch.Tensor]) -> ProductTimes:
    """Times some weights of one dtype in all formats, in turns. Draws no randomness."""
    sample = _sample(weights)
    number = sum(weight.numel() for weight in sample)
    products: list[list[_Product]]
    products = [[partial(own_linear, weight=weight, bias=None) for weight in sample]]
    packing: dict[str, float] = {}
    for name in formats_for(sample[0].dtype):
        start = perf_counter()
        with suppress(RuntimeError):
            matrices = [matrix for matrix in pack(name, sample) if matrix]
            if len(matrices) == len(sample):
                packing[name] = (perf_counter() - start) / number
                products.append([partial(matrix, bias=None) for matrix in matrices])
    generator = torch.Generator("cpu").manual_seed(0)
    inputs = [[_input(weight, n, generator) for weight in sample] for n in (_PLAIN, WIDE)]
    rounds = [
        [[_seconds(product, x) for x in inputs] for product in products] for _ in range(_ROUNDS)
    ]
    times = torch.tensor(rounds, dtype=torch.float64, device="cpu").amin(0) / number
    plain, *packed = map(tuple, times.tolist())
    shares = (times[1:] / times[0]).clamp(max=1).mean(1).tolist()
    if not shares or min(shares) > _PAYS:
        return ProductTimes(plain)
    best = shares.index(min(shares))
    return ProductTimes(plain, list(packing)[best], packed[best], [*packing.values()][best])


def _sample(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first layers, or of large ones the first rows."""
    sample: list[torch.Tensor] = []
    for weight in weights:
        if sum(weight.numel() for weight in sample) >= SAMPLE:
            break
        sample.append(weight[: max(_PART // weight.shape[1], 1)])
    return sample


def _input(weight: torch.Tensor, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.empty(num_tokens, weight.shape[1], dtype=torch.float32, device="cpu")
    return numbers.normal_(generator=generator).to(weight)


def _seconds(products: Sequence[_Product], inputs: Sequence[torch.Tensor]) -> float:
    """The time of all layers in a row."""
    start = perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product(x)
    return perf_counter() - start

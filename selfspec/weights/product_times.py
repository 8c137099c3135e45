"""What products with a model's weights take, as they are and packed: a few of them, timed.

Knows weights and formats; not when to time, nor what follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from selfspec.weights.formats import Packer, packers_for

_PLAIN, WIDE = 1, 8  # Tokens of a plain step, and of a step with drafts: both are timed.
# This many weights are timed. They leave the CPU's cache before they are used again.
SAMPLE = 1 << 23
_PART = SAMPLE // 8  # At most this many of one layer, so that several shapes are among them.
_ROUNDS = 3
# Packing pays if it cuts the time of products by at least 10 %.
_PAYS = 0.9
# A single token may take at most 25 % longer, since plain calls compute from packed weights, too.
# In bfloat16 under AVX2 it took 24 % longer, and eight tokens a fifth.
_MOST_OF_PLAIN = 1.25


class ProductTimes(NamedTuple):
    """Seconds of products, divided by the number of weights: with one token and with eight."""

    packer: Packer
    plain: Sequence[float]  # as torch computes them
    packed: Sequence[float]

    @property
    def share(self) -> float:
        """Of the time, what is left with packed layers where these are faster."""
        shares = [min(self.packed[index] / self.plain[index], 1.0) for index in (0, 1)]
        return sum(shares) / 2

    @property
    def pays(self) -> bool:
        """Does packing cut the time enough, and is a single token fast enough, too?"""
        return self.share <= _PAYS and self.packed[0] <= _MOST_OF_PLAIN * self.plain[0]


def product_times(weights: Sequence[torch.Tensor]) -> ProductTimes:
    """Times some weights of one dtype as they are and in the format that is best for them.

    Draws no randomness.
    """
    sample = _sample(weights)
    times = [_times_of(packer, sample) for packer in packers_for(sample[0].dtype)]
    return min(times, key=lambda times: times.share)


def _times_of(packer: Packer, sample: Sequence[torch.Tensor]) -> ProductTimes:
    """Products as they are and packed, in turns."""
    number = sum(weight.numel() for weight in sample)
    matrices = packer(sample)
    plain, packed = [math.inf, math.inf], [math.inf, math.inf]
    as_they_are = [partial(linear, weight=weight) for weight in sample]
    generator = torch.Generator("cpu").manual_seed(0)
    for index, num_tokens in enumerate((_PLAIN, WIDE)):
        inputs = [_input(weight, num_tokens, generator) for weight in sample]
        for _ in range(_ROUNDS):
            plain[index] = min(plain[index], _seconds(as_they_are, inputs) / number)
            if None not in matrices:  # As where a weight is not finite.
                packed[index] = min(packed[index], _seconds(matrices, inputs) / number)
    return ProductTimes(packer, plain, packed)


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


def _seconds(products: Sequence[Any], inputs: Sequence[torch.Tensor]) -> float:
    """The time of all layers in a row."""
    start = perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product(x, bias=None)
    return perf_counter() - start

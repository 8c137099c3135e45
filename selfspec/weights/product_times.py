"""How long products with a model's weights take, plain and packed: a few are timed.

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

# Tokens of a plain step, of a step with drafts, and of a prompt: all three are timed.
_NUMBERS = (1, 8, 64)
# This many weights are timed. They leave the CPU's cache before they are used again.
SAMPLE = 1 << 23
_PART = SAMPLE // 8  # At most this many of one layer, so that several shapes are among them.
_ROUNDS = 3
# Packing pays if it cuts the time of products by at least 10 %.
_PAYS = 0.9
# A single token may take at most 25 % longer, since plain calls compute from packed weights, too.
# In bfloat16 under AVX2 it took 24 % longer, and eight tokens a fifth.
_MOST_OF_PLAIN = 1.25
# A prompt may take at most 10 % longer. With bfloat16 on a CPU that calculates in it, prompts took
# up to 60 % longer from float16, though single tokens took less.
_MOST_OF_PROMPT = 1.1


class ProductTimes(NamedTuple):
    """Seconds of products with 1, 8 and 64 tokens, divided by the number of weights."""

    packer: Packer
    plain: Sequence[float]  # as torch computes them
    packed: Sequence[float]

    @property
    def share(self) -> float:
        """The share of steps' time that is left if layers are packed where that is faster."""
        shares = [min(self.packed[index] / self.plain[index], 1.0) for index in (0, 1)]
        return sum(shares) / 2

    @property
    def pays(self) -> bool:
        """Does packing cut the time of steps enough, and are a token and a prompt fast enough?"""
        most = _MOST_OF_PLAIN * self.plain[0], _MOST_OF_PROMPT * self.plain[2]
        is_fast = self.packed[0] <= most[0] and self.packed[2] <= most[1]
        return is_fast and self.share <= _PAYS


def product_times(weights: Sequence[torch.Tensor]) -> ProductTimes:
    """Times some weights of one dtype as they are and in the format that is best for them.

    Draws no randomness.
    """
    sample = _sample(weights)
    times = [_times_of(packer, sample) for packer in packers_for(sample[0].dtype)]
    return min(times, key=lambda times: (not times.pays, times.share))


def _times_of(packer: Packer, sample: Sequence[torch.Tensor]) -> ProductTimes:
    """Products as they are and packed, in turns; with a prompt, those of the first weight alone."""
    matrices = packer(sample)
    plain, packed = [math.inf] * len(_NUMBERS), [math.inf] * len(_NUMBERS)
    generator = torch.Generator("cpu").manual_seed(0)
    for index, num_tokens in enumerate(_NUMBERS):
        part = sample[:1] if num_tokens == _NUMBERS[-1] else sample
        inputs = [_input(weight, num_tokens, generator) for weight in part]
        as_they_are = [partial(linear, weight=weight) for weight in part]
        number = sum(weight.numel() for weight in part)
        for _ in range(_ROUNDS):
            plain[index] = min(plain[index], _seconds(as_they_are, inputs) / number)
            if None not in matrices:  # None: a weight that is not finite can't be packed.
                seconds = _seconds(matrices[: len(part)], inputs)
                packed[index] = min(packed[index], seconds / number)
    return ProductTimes(packer, plain, packed)


def _sample(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first layers, or of large ones the first rows."""
    sample: list[torch.Tensor] = []
    for weight in weights:
        if sum(weight.numel() for weight in sample) >= SAMPLE:
            break
        sample.append(weight.detach()[: max(_PART // weight.shape[1], 1)])
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

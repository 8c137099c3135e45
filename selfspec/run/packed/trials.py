"""Short trials of one kind of layer: what its products take, as torch computes them and packed.

What trials found is kept on disk for the processor, torch's version and its number of threads, so
that the next process knows at once. Knows layers and clocks; not how much a model is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple

import torch

from selfspec.machine.hardware import processor
from selfspec.machine.measured import find_measured, keep_measured
from selfspec.run.packed.linears import own_linear, pack_all, ways_for

__all__ = ["WIDTHS", "Kind", "Trial", "glance", "known_trial", "price_of", "seconds_for", "trial"]

WIDTHS = (1, 4, 16, 64)  # A trial times inputs of this many tokens.
_DECIDE = WIDTHS[:3]  # Steps are as wide as these; 64 stands for a prompt.
_PAYS = 0.9  # Pack a layer only if that cuts its time by at least 10 %.
_EQUAL = 1.02  # The copy is used from the number of tokens on where it takes at most 2 % longer.
# A trial takes this many weights, so that they leave the CPU's cache between two products.
_MOST_WEIGHTS = 1 << 23
_ROUNDS = 2
_CLOCKED = 0.02  # About the seconds of a trial besides packing.

_Product = Callable[[torch.Tensor], object]


class Kind(NamedTuple):
    """The shape and dtype of a weight; layers of one kind take the same time."""

    num_out: int
    num_in: int
    dtype: torch.dtype

    @property
    def num_weights(self) -> int:
        """The weights of one layer."""
        return self.num_out * self.num_in


class Trial(NamedTuple):
    """Seconds of one layer's product by its number of tokens, and the way that is faster."""

    own: dict[int, float]  # as torch computes it
    way: str | None  # None: no way is at least 10 % faster
    packed: dict[int, float]  # in that way; empty without one
    packing: float  # seconds to pack the layer

    @property
    def least_tokens(self) -> int:
        """From how many tokens on the copy is used, as far as narrow inputs go."""
        equal = (n for n in range(1, _DECIDE[-1]) if self._is_equal(n))
        return next(equal, _DECIDE[-1])

    @property
    def most_tokens(self) -> int | None:
        """Up to how many tokens the copy is used; None for any number."""
        widest = WIDTHS[-1]
        return None if self.packed[widest] <= self.own[widest] else WIDTHS[-2]

    def _is_equal(self, num_tokens: int) -> bool:
        own, packed = (seconds_for(times, num_tokens) for times in (self.own, self.packed))
        return packed <= _EQUAL * own

    def best(self) -> dict[int, float]:
        """The seconds of the layer once it is packed."""
        return {w: min(self.own[w], self.packed.get(w, self.own[w])) for w in WIDTHS}


def seconds_for(times: Mapping[int, float], num_tokens: int) -> float:
    """Seconds for any number of tokens: straight between the measured ones, proportional behind.

    >>> [seconds_for({1: 1.0, 4: 4.0, 16: 8.0, 64: 20.0}, n) for n in (1, 2, 16, 128)]
    [1.0, 2.0, 8.0, 40.0]
    """
    if num_tokens >= WIDTHS[-1]:
        return times[WIDTHS[-1]] * num_tokens / WIDTHS[-1]
    left, right = next((a, b) for a, b in pairwise(WIDTHS) if num_tokens < b)
    share = (num_tokens - left) / (right - left)
    return (1 - share) * times[left] + share * times[right]


def glance(weight: torch.Tensor) -> dict[int, float]:
    """What the own product of one layer takes, about: quickly measured, and never kept."""
    part, scale = _part(weight, _MOST_WEIGHTS // 4)
    product = partial(own_linear, weight=part, bias=None)
    seconds = {w: scale * _seconds([product], _input(weight, w)) for w in (1, WIDTHS[-2])}
    per_token = (seconds[WIDTHS[-2]] - seconds[1]) / (WIDTHS[-2] - 1)
    return {w: max(seconds[1] + per_token * (w - 1), 0.0) for w in WIDTHS}


def price_of(kind: Kind, num_layers: int) -> float:
    """About how many seconds a trial of this kind takes."""
    weights = min(kind.num_weights * num_layers, _MOST_WEIGHTS)
    return sum(weights / way.weights_per_second for way in ways_for(kind.dtype)) + _CLOCKED


def known_trial(kind: Kind) -> Trial | None:
    """What an earlier trial on this machine has found; None if there was none."""
    values = find_measured(_key(kind))
    try:
        own, packed = ({int(w): float(s) for w, s in values[name].items()} for name in _TIMES)
        found = Trial(own, values["way"], packed, float(values["packing"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    ways = {way.name for way in ways_for(kind.dtype)}
    complete = {frozenset(own), frozenset(packed or own)} == {frozenset(WIDTHS)}
    fits = found.way is None or (found.way in ways and bool(packed))
    sound = all(0 <= s < 3600 for s in (*own.values(), *packed.values(), found.packing))
    return found if complete and fits and sound else None


def trial(kind: Kind, weights: Sequence[torch.Tensor]) -> Trial:
    """Times layers of one kind in all ways, in turns; keeps what it found. Draws no randomness."""
    weights, scale = _sample(kind, weights)
    own: list[_Product] = [partial(own_linear, weight=w, bias=None) for w in weights]
    copies, packing = {}, {}
    for way in ways_for(kind.dtype):
        start = perf_counter()
        try:
            copies[way.name] = pack_all(way, weights)
        except (RuntimeError, ValueError):
            continue
        packing[way.name] = perf_counter() - start
    layers: dict[str | None, Sequence[_Product]] = {None: own}
    for name, of in copies.items():
        layers[name] = [partial(copy, bias=None) for copy in of]
    times = _in_turns(layers, weights[0])
    found = _decided(times, packing, scale / len(weights))
    keep_measured([(_key(kind), found._asdict())])
    return found


def _decided(
    times: Mapping[str | None, Mapping[int, float]], packing: Mapping[str, float], scale: float
) -> Trial:
    """The fastest way, if it pays; `scale` makes one layer's seconds of all that were timed."""

    def share(name: str) -> float:
        return mean(min(times[name][w] / times[None][w], 1.0) for w in _DECIDE)

    own = {w: scale * seconds for w, seconds in times[None].items()}
    best = min(packing, key=share, default=None)
    if best is None or share(best) > _PAYS:
        return Trial(own, None, {}, 0.0)
    packed = {w: scale * seconds for w, seconds in times[best].items()}
    return Trial(own, best, packed, scale * packing[best])


def _in_turns(
    layers: Mapping[str | None, Sequence[_Product]], weight: torch.Tensor
) -> dict[str | None, dict[int, float]]:
    """The least seconds of all layers in a row, for each way and number of tokens."""
    times: dict[str | None, dict[int, float]] = {name: {} for name in layers}
    for num_tokens in WIDTHS:
        x = _input(weight, num_tokens)
        for _ in range(_ROUNDS):
            for name, products in layers.items():
                taken = _seconds(products, x)
                times[name][num_tokens] = min(taken, times[name].get(num_tokens, taken))
    return times


def _sample(kind: Kind, weights: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], float]:
    """Layers to time, or a part of a large one and how many times as large the layer is."""
    if kind.num_weights > _MOST_WEIGHTS:
        part, scale = _part(weights[0], _MOST_WEIGHTS)
        return [part], scale
    return weights[: max(_MOST_WEIGHTS // kind.num_weights, 1)], 1.0


def _part(weight: torch.Tensor, most: int) -> tuple[torch.Tensor, float]:
    """The first rows of a weight, and how many times as large the weight is."""
    num_rows = min(weight.shape[0], max(most // weight.shape[1], 1))
    return weight[:num_rows], weight.shape[0] / num_rows


def _input(weight: torch.Tensor, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, weight.shape[1], generator=generator).to(weight.dtype)


def _seconds(products: Sequence[_Product], x: torch.Tensor) -> float:
    """The time of all layers in a row."""
    start = perf_counter()
    for product in products:
        product(x)
    return perf_counter() - start


_TIMES = ("own", "packed")


def _key(kind: Kind) -> dict[str, Any]:
    return {
        "measured": "products",
        "out": kind.num_out,
        "in": kind.num_in,
        "dtype": str(kind.dtype),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }

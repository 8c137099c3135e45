"""Projections of a few tokens the other way round, for CPUs whose math library is faster so.

``x Wᵀ`` and ``(W xᵀ)ᵀ`` are the same sums of the same products. A math library has other code for
each, and for a handful of tokens one may be several times as fast as the other: which one, only
this machine can tell. Knows `nn.Linear`; not what a model is made of beside, nor who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import linear

__all__ = ["NUM_TOKENS", "Product", "faster_turned", "products_of", "turned", "turning"]

NUM_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # that are told apart, all rows together
_LEAST_WEIGHTS = 1 << 16  # a smaller product takes as long as it takes to ask for it
_ENOUGH_BYTES = 1 << 26  # of weights, that no cache holds what the next one needs
_PAYS = 0.9  # of the time, at most
_ROUNDS = 3


class Product(NamedTuple):
    """What tells one projection's cost from another's."""

    out_features: int
    in_features: int
    dtype: torch.dtype


def products_of(model: nn.Module) -> dict[Product, list[nn.Linear]]:
    """The model's plain projections on a CPU that are worth turning, those of a kind together.

    Leaves out what only looks like one: quantised or parametrised ones, those that a hook of
    accelerate's moves about. None of a model that was compiled, which would be compiled anew.
    Costs some µs a module.
    """
    found: dict[Product, list[nn.Linear]] = {}
    for module in model.modules():
        if _is_compiled(module):
            return {}
        own = vars(module).get("forward")
        if type(module) is not nn.Linear or not (own is None or isinstance(own, _TurningForward)):
            continue
        weight = module.weight
        if weight.device.type == "cpu" and weight.numel() >= _LEAST_WEIGHTS:
            product = Product(module.out_features, module.in_features, weight.dtype)
            found.setdefault(product, []).append(module)
    return found


def turned(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear(x, weight, bias)` as weight times tokens, in the layout that `linear` gives.

    A token alone is doubled: times one column the library would fall back to what it does anyway.
    Nothing is kept for gradients.
    """
    tokens = x.reshape(-1, x.shape[-1])
    columns = tokens if len(tokens) > 1 else torch.cat([tokens, tokens])
    outcome = torch.mm(weight, columns.t())[:, : len(tokens)].t().contiguous()  # (N, O)
    if bias is not None:
        outcome += bias
    return outcome.reshape(*x.shape[:-1], len(weight))


def faster_turned(modules: Sequence[nn.Linear], *, max_seconds: float) -> tuple[int, ...]:
    """Of `NUM_TOKENS`, those for which these products of one kind are clearly faster turned.

    Both ways by turns and weight after weight, as in a forward, so that both find them where a
    forward does. Takes one round at least, however long.
    """
    end = perf_counter() + max_seconds
    weights = _enough_of([module.weight for module in modules])
    ways = (partial(linear, bias=None), partial(turned, bias=None))
    seconds: dict[int, list[list[float]]] = {number: [] for number in NUM_TOKENS}
    for around in range(_ROUNDS + 1):
        for number, rounds in seconds.items():
            x = weights[0].new_ones(number, weights[0].shape[1])
            both = [_seconds_of(way, x, weights) for way in ways]
            if around:  # the first one warms up
                rounds.append(both)
        if around and perf_counter() > end:
            break
    return tuple(number for number, rounds in seconds.items() if _is_faster(rounds))


@contextmanager
def turning(model: nn.Module, table: Mapping[Product, Collection[int]]) -> Iterator[None]:
    """Turns the products of a model's forwards inside, in this thread alone.

    `table` says for how many tokens, of `NUM_TOKENS`, each kind is turned; what lies between goes
    with the next higher. Where several threads are inside at once, the first one's table holds.
    """
    with _lock:
        turns = _turns.get(model)
        if turns is None:
            turns = _turns[model] = _Turns(model, table)
        turns.num_inside += 1
    outside, _this_thread.turns = _this_thread.turns, True
    try:
        yield
    finally:
        _this_thread.turns = outside
        with _lock:
            turns.num_inside -= 1
            if not turns.num_inside:
                del _turns[model]
                turns.undo()


class _ThisThread(threading.local):
    turns = False


class _TurningForward:
    """Stands in for one module's `forward`."""

    def __init__(self, module: nn.Linear, pays: Sequence[bool]) -> None:
        self._module = module
        self._pays = pays  # by the number of tokens

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        number = x.numel() // x.shape[-1]
        pays = number < len(self._pays) and self._pays[number] and _this_thread.turns
        return (turned if pays else linear)(x, self._module.weight, self._module.bias)


class _Turns:
    """The stand-ins in one model."""

    def __init__(self, model: nn.Module, table: Mapping[Product, Collection[int]]) -> None:
        self.num_inside = 0
        self._forwards: list[tuple[nn.Module, _TurningForward]] = []
        for product, modules in products_of(model).items():
            pays = _by_number(table.get(product, ()))
            for module in modules if any(pays) else ():
                forward = vars(module)["forward"] = _TurningForward(module, pays)
                self._forwards.append((module, forward))

    def undo(self) -> None:
        for module, forward in self._forwards:
            if vars(module).get("forward") is forward:  # else somebody else's by now
                del vars(module)["forward"]


_lock = threading.Lock()
_this_thread = _ThisThread()
_turns: WeakKeyDictionary[nn.Module, _Turns] = WeakKeyDictionary()


def _is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or with a compiled function for its forward."""
    own = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(own, "_torchdynamo_orig_callable")


def _by_number(numbers: Collection[int]) -> list[bool]:
    """For every number of tokens up to the highest of `NUM_TOKENS`; none at all is never turned."""
    pays = [False]
    for number in NUM_TOKENS:
        pays += [number in numbers] * (number + 1 - len(pays))
    return pays


def _is_faster(rounds: Sequence[Sequence[float]]) -> bool:
    """Is the second way clearly faster than the first, by the medians of some rounds?"""
    straight, other = ([both[way] for both in rounds] for way in (0, 1))
    return median(other) < _PAYS * median(straight)


def _enough_of(weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    number = -(-_ENOUGH_BYTES // weights[0].nbytes)
    return weights[:number]


def _seconds_of(way: Any, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    start = perf_counter()
    for weight in weights:
        way(x, weight)
    return perf_counter() - start

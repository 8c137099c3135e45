"""A model's projections, computed otherwise where this machine is faster so.

``x Wᵀ`` and ``(W xᵀ)ᵀ``, *turned*, are the same sums of the same products. A math library has other
code for each, and for a handful of tokens one may be several times as fast as the other. From
weights that lie as the library wants them, *packed*, it spares itself the sorting, but they are a
second copy. A CPU that can't calculate in half precision takes stock's way for one token after the
other; *widened* to float32, a part of the weights at a time, they are done all at once, and may be
settled to the same bits; *native* code of our own comes to them by itself. Which way is fastest,
only this machine can tell. Knows `nn.Linear`; not what a model is made of beside, nor who asks.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import mean, median
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.native import project, projects
from selfspec.packed import (
    HALVES,
    TYPICAL,
    Copy,
    Group,
    Way,
    groups_of,
    pack,
    packed_ways,
    settles,
)
from selfspec.scratch import Scratch
from selfspec.settled import Part, settle

__all__ = [
    "LINEAR",
    "NATIVE",
    "NUM_TOKENS",
    "PACKED",
    "TURNED",
    "WIDENED",
    "Product",
    "Products",
    "Table",
    "announce",
    "best_ways",
    "has_native",
    "products_of",
    "seconds_by_way",
    "turned",
    "turning",
    "widened",
]

LINEAR, TURNED, WIDENED, NATIVE, PACKED = "linear", "turned", "widened", "native", "packed"
# that are told apart, all rows together; the last one stands for all above it, as prompts have
NUM_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 256)
_LEAST_WEIGHTS = 1 << 16  # a smaller product takes as long as it takes to ask for it
_ENOUGH_BYTES = 1 << 26  # of weights, that no cache holds what the next one needs
_PAYS = 0.9  # of the time, at most
_ROUNDS = 3
_LONG = 0.01  # seconds: what takes longer than to read that much does not hang on caches
_AT_ONCE = 1 << 20  # numbers that are widened: 4 MB
_CLOSE = 0.01  # of the largest outcome: what more than rounding leaves is another product


class Product(NamedTuple):
    """What tells one projection's cost from another's, or that of several of one input."""

    out_features: tuple[int, ...]  # of each
    in_features: int
    dtype: torch.dtype


Products = Mapping[Product, Sequence[Group]]  # of one model
Table = Mapping[Product, Sequence[str]]  # the way for each of `NUM_TOKENS`


def products_of(model: nn.Module) -> dict[Product, list[Group]]:
    """The model's plain projections on a CPU that are worth a thought, those of a kind together.

    Leaves out what only looks like one: quantised or parametrised ones, those that a hook of
    accelerate's moves about. None of a model that was compiled, which would be compiled anew.
    Costs some µs a module.
    """
    parents = list(model.modules())
    modules: dict[nn.Linear, None] = {}
    for module in parents:
        if _is_compiled(module):
            return {}
        if type(module) is nn.Linear and _is_plain(module):
            modules[module] = None
    found: dict[Product, list[Group]] = {}
    for group in groups_of(parents, modules):
        sizes = tuple(module.out_features for module in group)
        product = Product(sizes, group[0].in_features, group[0].weight.dtype)
        found.setdefault(product, []).append(group)
    return found


def _is_plain(module: nn.Linear) -> bool:
    """Nothing but a matrix of a size worth a thought."""
    own = vars(module).get("forward")
    if not (own is None or isinstance(own, _StandIn)):
        return False
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_contiguous():
        return False
    return weight.device.type == "cpu" and weight.numel() >= _LEAST_WEIGHTS


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


def widened(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, settled: bool = False
) -> torch.Tensor:
    """`linear` in half precision, turned and in float32, in the layout that `linear` gives.

    Takes no memory but for a part of the weights, which each thread keeps. `settled`: to stock's
    own bits, where `settles` says so. Nothing is kept for gradients.
    """
    if x.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):  # as stock converts it
        return linear(x, weight, bias)
    tokens = x.reshape(-1, x.shape[-1])
    columns = tokens.float().t()
    outcome = tokens.new_empty(len(tokens), len(weight))
    size = max(_AT_ONCE // weight.shape[1], 1)
    for first in range(0, len(weight), size):
        rows = slice(first, first + size)
        part = Part(weight.detach()[rows], None if bias is None else bias.detach()[rows])
        wide = _SCRATCH.room(*part.weight.shape).copy_(part.weight)
        sums = torch.mm(wide, columns).t()  # (N, rows)
        if settled:
            lengths = torch.linalg.vector_norm(wide, dim=-1)
            outcome[:, rows] = settle(sums, tokens, [part], lengths)
        else:
            outcome[:, rows] = sums if part.bias is None else sums + part.bias
    return outcome.view(*x.shape[:-1], len(weight))


_WIDENED_SETTLED = partial(widened, settled=True)
# that take no copy
_WAYS: dict[str, Way] = {LINEAR: linear, TURNED: turned, WIDENED: widened, NATIVE: project}


def has_native(dtype: torch.dtype, in_features: int) -> bool:
    """Is there native code for such weights? Nothing is compiled where stock's is fast."""
    return settles(dtype) and projects(dtype, in_features)


def seconds_by_way(
    groups: Sequence[Group], *, max_seconds: float, settled: bool = False
) -> dict[str, tuple[float, ...]]:
    """What one of these products takes for each of `NUM_TOKENS`, each way that there is.

    `settled`: each that comes to stock's bits, where `settles` says that they can be had. All ways
    by turns and weight after weight, as in a forward, so that all find them where a forward does.
    Takes one round at least, however long.
    """
    end = perf_counter() + max_seconds
    groups = _enough_of(groups)
    ways = _ways_to(groups, settled)
    rounds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for around in range(_ROUNDS + 1):
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in NUM_TOKENS:
            x = _some_tokens(number, groups[0][0])
            for name, each in ways.items():
                found[name].append(_seconds_of(each, x, groups))
        for name, seconds in found.items() if around else ():  # the first one warms up
            rounds[name].append(seconds)
        if around and perf_counter() > end:
            break
    return {name: tuple(map(median, zip(*each, strict=True))) for name, each in rounds.items()}


def best_ways(seconds: Mapping[str, Sequence[float]], allowed: Collection[str]) -> tuple[str, ...]:
    """For each of `NUM_TOKENS` the way to go, of `LINEAR` and those allowed.

    Turned, widened or native where that is clearly faster. Packed, if that pays on the whole,
    wherever none of the others is clearly faster: the copy is there then.

    >>> best_ways({"linear": [3, 3, 3], "turned": [2, 2, 4]}, ["turned", "packed"])
    ('turned', 'turned', 'linear')
    >>> best_ways({"linear": [3, 6, 9], "widened": [5, 5, 5]}, ["turned", "widened"])
    ('linear', 'widened', 'widened')
    >>> best_ways({"linear": [3, 3, 3], "packed": [1, 2.9, 4]}, ["packed"])
    ('packed', 'packed', 'linear')
    >>> best_ways({"linear": [3, 3, 3], "packed": [9, 2, 2]}, ["packed"])
    ('linear', 'packed', 'packed')
    >>> best_ways({"linear": [3, 3, 3], "packed": [2.9, 2.9, 2.9]}, ["packed"])
    ('linear', 'linear', 'linear')
    """
    ways, least = [LINEAR] * len(seconds[LINEAR]), list(seconds[LINEAR])
    for name in (TURNED, WIDENED, NATIVE):
        for place, other in enumerate(seconds.get(name, ()) if name in allowed else ()):
            if other < _PAYS * least[place]:
                ways[place], least[place] = name, other
    if PACKED in allowed and PACKED in seconds:
        shares = [mine / other for mine, other in zip(seconds[PACKED], least, strict=True)]
        if mean(min(share, 1.0) for share in shares) < _PAYS:  # the others are still there
            ways = [
                PACKED if share * _PAYS < 1 else way
                for way, share in zip(ways, shares, strict=True)
            ]
    return tuple(ways)


@contextmanager
def turning(
    model: nn.Module,
    table: Table,
    copies: Mapping[Group, Copy] | None = None,
    *,
    settled: bool = False,
) -> Iterator[None]:
    """Computes the products of a model's forwards otherwise inside, in this thread alone.

    `table` says how, for each of `NUM_TOKENS`; what lies between goes with the next higher, and
    what lies above with the last. `copies` are the packed weights, by who uses them; `settled`:
    see `seconds_by_way`. Where several threads are inside at once, the first one's table holds.
    """
    with _lock:
        turns = _turns.get(model)
        if turns is None:
            turns = _turns[model] = _Turns(model, table, copies or {}, settled)
        turns.enter()
    outside, _this_thread.turns = _this_thread.turns, True
    try:
        yield
    finally:
        _this_thread.turns = outside
        with _lock:
            if turns.leave():
                del _turns[model]


def announce(model: nn.Module, num_tokens: int) -> None:
    """Says how many tokens, all rows together, this thread's next forward of the model has.

    Where `turning` would leave all products of so few alone, what it put into the model is taken
    away till more are announced, or another thread comes: some µs for each product, at each step.
    Outside of `turning` nothing happens.
    """
    turns = _turns.get(model)
    if turns is not None and _this_thread.turns:
        with _lock:
            turns.announce(num_tokens)


class _ThisThread(threading.local):
    turns = False


class _StandIn:
    """Stands in for one module's `forward`."""

    def __init__(self, module: nn.Linear, ways: Sequence[Way]) -> None:
        self._module = module
        self._ways = (linear, *ways)  # for no token at all, and for each of `NUM_TOKENS`

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        place = _place_of(x.numel() // x.shape[-1])
        way = self._ways[place] if _this_thread.turns else linear
        return way(x, self._module.weight, self._module.bias)

    def put(self) -> None:
        vars(self._module).setdefault("forward", self)

    def take_away(self) -> None:
        if vars(self._module).get("forward") is self:  # else somebody else's by now
            del vars(self._module)["forward"]


def _place_of(num_tokens: int) -> int:
    return _PLACES[min(num_tokens, _LAST)]


_LAST = NUM_TOKENS[-1]
_PLACES = [bisect_left((0, *NUM_TOKENS), number) for number in range(_LAST + 1)]


class _Turns:
    """The stand-ins in one model. Not safe without the lock."""

    def __init__(
        self, model: nn.Module, table: Table, copies: Mapping[Group, Copy], settled: bool
    ) -> None:
        self._threads: Counter[int] = Counter()  # inside, and how often
        self._are_put = False
        packed = packed_ways(copies, settled=settled)
        self._forwards: list[_StandIn] = []
        self._used = [False] * (len(NUM_TOKENS) + 1)  # at each place
        for product, groups in products_of(model).items():
            names = table.get(product, ())
            for module in itertools.chain(*groups) if set(names) - {LINEAR} else ():
                known = dict(_WAYS)
                if settled and settles(product.dtype):
                    known[WIDENED] = _WIDENED_SETTLED
                if module in packed:
                    known[PACKED] = packed[module]
                ways = [known.get(name, linear) for name in names]
                self._forwards.append(_StandIn(module, ways))
                for place, way in enumerate(ways, start=1):
                    self._used[place] |= way is not linear

    def enter(self) -> None:
        self._threads[threading.get_ident()] += 1
        self._put(True)

    def leave(self) -> bool:
        """True if it was the last one."""
        self._threads[threading.get_ident()] -= 1
        self._threads += Counter()  # drops who is no longer inside
        if not self._threads:
            self._put(False)
        return not self._threads

    def announce(self, num_tokens: int) -> None:
        self._put(len(self._threads) > 1 or self._used[_place_of(num_tokens)])

    def _put(self, are_put: bool) -> None:
        if are_put is self._are_put:
            return
        self._are_put = are_put
        for forward in self._forwards:
            if are_put:
                forward.put()
            else:
                forward.take_away()


_SCRATCH = Scratch(_AT_ONCE)
_lock = threading.Lock()
_this_thread = _ThisThread()
_turns: WeakKeyDictionary[nn.Module, _Turns] = WeakKeyDictionary()


def _is_compiled(module: nn.Module) -> bool:
    """By `module.compile()`, or with a compiled function for its forward."""
    own = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(own, "_torchdynamo_orig_callable")


def _enough_of(groups: Sequence[Group]) -> Sequence[Group]:
    num_bytes = sum(module.weight.nbytes for module in groups[0])
    return groups[: -(-_ENOUGH_BYTES // num_bytes)]


def _ways_to(groups: Sequence[Group], settled: bool) -> dict[str, Mapping[nn.Linear, Way]]:
    """Each way for each module; packed only where that comes out right."""
    modules = list(itertools.chain(*groups))
    dtype = modules[0].weight.dtype
    settled = settled and settles(dtype)
    ways: dict[str, Mapping[nn.Linear, Way]] = {LINEAR: dict.fromkeys(modules, linear)}
    if has_native(dtype, modules[0].in_features):
        ways[NATIVE] = dict.fromkeys(modules, project)
        if settled:  # nothing comes to the same bits as fast
            return ways
    if not settled:
        ways[TURNED] = dict.fromkeys(modules, turned)
    if dtype in HALVES:
        ways[WIDENED] = dict.fromkeys(modules, _WIDENED_SETTLED if settled else widened)
    try:
        copies = {group: pack([m.weight for m in group]) for group in groups}
        packed = packed_ways(copies, settled=settled)
        if _come_out_right(groups[0], packed):
            ways[PACKED] = packed
    except RuntimeError:  # no code of the library's for this dtype on this CPU, or no memory
        pass
    return ways


def _some_tokens(number: int, module: nn.Linear) -> torch.Tensor:
    """Different ones: how many sums must be settled, and so the time, hangs on them."""
    numbers = torch.Generator().manual_seed(0)
    return torch.randn(number, module.in_features, generator=numbers).to(module.weight.dtype)


def _come_out_right(group: Group, ways: Mapping[nn.Linear, Way]) -> bool:
    x = _some_tokens(TYPICAL, group[0])
    for module in group:
        expected = linear(x, module.weight, module.bias)
        found = ways[module](x, module.weight, module.bias)
        slack = _CLOSE * float(expected.detach().abs().max())
        if not torch.allclose(found, expected, rtol=_CLOSE, atol=slack):
            return False
    return True


def _seconds_of(ways: Mapping[nn.Linear, Way], x: torch.Tensor, groups: Sequence[Group]) -> float:
    """For one group, of as many as are done in a little while."""
    start, num_done, seconds = perf_counter(), 0, 0.0
    while num_done < len(groups) and seconds < _LONG:
        for module in groups[num_done]:
            ways[module](x, module.weight, module.bias)
        num_done, seconds = num_done + 1, perf_counter() - start
    return seconds / num_done

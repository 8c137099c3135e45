"""The packed weights of one model: which layers have them, and whether they are up to date.

A layer is packed only if a short trial shows that this cuts its time by at least 10 %. All users of
a model share one set of copies, which is freed with the last of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import psutil
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.run.packed.linears import can_pack, pack, packed_bytes, packed_linear

__all__ = ["PackedWeights"]

_PAYS = 0.9  # Pack a layer only if that cuts its time by at least 10 %.
_NUM_TOKENS = (1, 4, 16)  # A trial times forwards of so many tokens.
# A trial runs so many bytes of weights, so that a layer's weights leave the CPU's cache in between.
_TRIAL_BYTES = 1 << 26
_LEAST_WEIGHTS = 1 << 16  # In a smaller layer, the call costs more than the product.
_SHARE_OF_FREE = 0.25  # Unless the user asks for them, copies take at most this share.
_CGROUP = Path("/sys/fs/cgroup")

_Kind = tuple[int, int, torch.dtype]  # the shape and dtype of a weight


class _Copy(NamedTuple):
    address: int
    dtype: torch.dtype
    sums: torch.Tensor  # the sum of each row of the weight, to notice changes
    packed: torch.Tensor


class PackedWeights:
    """Copies of a model's weights, made by `prepare`. Safe to use from several threads."""

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Linear, _Copy] = WeakKeyDictionary()
        self._pays: dict[_Kind, bool] = {}
        self._stand_ins = _StandIns()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, model: nn.Module) -> PackedWeights:
        """The model's copies if it has some already, or new ones."""
        with _lock:
            known = _shared.get(model)
            weights = known() if known is not None else None
            if weights is None:
                weights = cls()
                _shared[model] = ref(weights)
            return weights

    @property
    def num_bytes(self) -> int:
        """How many bytes the copies take at most."""
        return sum(packed_bytes(module.weight) for module in list(self._copies))

    def prepare(self, model: nn.Module, *, whatever_memory: bool = False) -> str | None:
        """Packs the layers that get faster, with their present weights.

        Returns why no layer is packed, or None. The first call takes up to half a second for each
        kind of layer. Weights can change between two calls without a trace in torch, for example
        when adapters are merged. So each call sums up their rows, in a fraction of a forward's
        time.
        """
        with self._lock, torch.no_grad():
            kinds = _kinds_of(model)
            if not kinds:
                return "it has no plain linear layers on a CPU that torch can pack"
            missing = sum(
                packed_bytes(module.weight)
                for kind, modules in kinds.items()
                for module in modules
                if self._pays.get(kind, True) and module not in self._copies
            )
            if not whatever_memory and missing > _SHARE_OF_FREE * _free_memory():
                return f"packed weights would take {missing / 1e6:.0f} MB, too much of what is free"
            for kind, modules in kinds.items():
                if kind not in self._pays:
                    self._pays[kind] = _pays(modules)
                if self._pays[kind]:
                    self._refresh(modules)
            return None if self._copies else "no layer is at least 10 % faster packed"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, and in this thread alone, the packed layers compute from their copies."""
        with self._lock:  # Another thread may be packing further layers.
            copies = {module: copy.packed for module, copy in self._copies.items()}
        with self._stand_ins.put(copies):
            yield

    def _refresh(self, modules: Sequence[nn.Linear]) -> None:
        for module in modules:
            weight, held = module.weight.detach(), self._copies.get(module)
            key, sums = (weight.data_ptr(), weight.dtype), _row_sums(weight)
            if held is None or held[:2] != key or not torch.equal(held.sums, sums):
                self._copies[module] = _Copy(*key, sums, pack(weight))


_lock = threading.Lock()
_shared: WeakKeyDictionary[nn.Module, ref[PackedWeights]] = WeakKeyDictionary()


class _ThisThread(threading.local):
    is_inside = False


_this_thread = _ThisThread()


class _StandIn:
    """Replaces one layer's `forward` while it is put into the layer."""

    def __init__(self, module: nn.Linear, packed: torch.Tensor) -> None:
        self._module = module
        self._packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if _this_thread.is_inside and x.numel():
            return packed_linear(x, self._module.weight, self._module.bias, self._packed)
        return linear(x, self._module.weight, self._module.bias)


class _StandIns:
    """The stand-ins that are in a model's layers while at least one thread uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._put: list[nn.Linear] = []

    @contextmanager
    def put(self, copies: dict[nn.Linear, torch.Tensor]) -> Iterator[None]:
        with self._lock:
            self._num_inside += 1
            for module, packed in copies.items():
                if "forward" not in vars(module):
                    vars(module)["forward"] = _StandIn(module, packed)
                    self._put.append(module)
        outside, _this_thread.is_inside = _this_thread.is_inside, True
        try:
            yield
        finally:
            _this_thread.is_inside = outside
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._take_away()

    def _take_away(self) -> None:
        for module in self._put:
            if isinstance(
                vars(module).get("forward"), _StandIn
            ):  # Other code may have replaced it.
                del vars(module)["forward"]
        self._put.clear()


def _kinds_of(model: nn.Module) -> dict[_Kind, list[nn.Linear]]:
    """The model's plain linear layers on a CPU, by kind; none if the model is compiled.

    Leaves out quantised layers and layers whose `forward` other code has replaced.
    """
    kinds: dict[_Kind, list[nn.Linear]] = {}
    for module in model.modules():
        own = vars(module).get("forward")
        if module._compiled_call_impl is not None or hasattr(own, "_torchdynamo_orig_callable"):
            return {}
        if type(module) is nn.Linear and (own is None or isinstance(own, _StandIn)):
            weight = module._parameters.get("weight")
            if weight is not None and _is_plain(weight):
                kinds.setdefault((*weight.shape, weight.dtype), []).append(module)
    return kinds


def _is_plain(weight: nn.Parameter) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and can_pack(weight.dtype)
    )


def _pays(modules: Sequence[nn.Linear]) -> bool:
    """Whether packed weights make layers of one kind at least 10 % faster in a short trial."""
    num_bytes = modules[0].weight.nbytes
    modules = modules[: -(-_TRIAL_BYTES // num_bytes)]
    stand_ins = [_StandIn(module, pack(module.weight)) for module in modules]
    generator = torch.Generator().manual_seed(0)
    shares = []
    for num_tokens in _NUM_TOKENS:
        x = torch.randn(num_tokens, modules[0].in_features, generator=generator)
        x = x.to(modules[0].weight.dtype)
        rounds = [(_seconds(modules, x), _seconds(stand_ins, x)) for _ in range(2)]
        plain, packed = map(min, zip(*rounds, strict=True))
        shares.append(packed / plain)
    return bool(mean(shares) <= _PAYS)


def _seconds(layers: Sequence[Callable[[torch.Tensor], object]], x: torch.Tensor) -> float:
    """The time of all layers in a row, so that no weight is still in the CPU's cache."""
    outside, _this_thread.is_inside = _this_thread.is_inside, True
    start = perf_counter()
    try:
        for layer in layers:
            layer(x)
    finally:
        _this_thread.is_inside = outside
    return perf_counter() - start


def _row_sums(weight: torch.Tensor) -> torch.Tensor:
    """The sum of each row's bits, read as the longest integers that fill the row."""
    num_bytes = weight.shape[1] * weight.element_size()
    words = torch.int64 if num_bytes % 8 == 0 else torch.int16 if num_bytes % 2 == 0 else torch.int8
    return weight.view(words).sum(-1)


def _free_memory() -> float:
    """How many bytes are free on this machine, or in our container if that has fewer."""
    free = float(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        return min(free, float(limit) - float(used))
    except (OSError, ValueError):  # No container, or one without a limit.
        return free

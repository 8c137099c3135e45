"""The linear layers of a model that can be packed, and the stand-ins for their `forward`."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.compat.modules import is_compiled, num_writes
from selfspec.run.packed.linears import Copy, own_linear, packed_linear, ways_for
from selfspec.run.packed.trials import Kind

__all__ = ["Held", "Kinds", "Origin", "Slot", "StandIns", "kinds_of", "linears_of", "put_in_place"]

_LEAST_WEIGHTS = 1 << 16  # In a smaller layer, the call costs more than the product.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_AT_ONCE = 8  # Rows of words that are added up at once, which the memory can keep pace with.

Kinds: TypeAlias = dict[Kind, list[nn.Linear]]


class Origin(NamedTuple):
    """Which weight a copy was made of. Another value, and the copy is not used.

    Torch does not count writes through `.data`, so the contents belong to it. Looking at them takes
    a part of a plain step's time.
    """

    place: tuple[int, int]  # the address, and how often torch has seen it written
    layout: tuple[object, ...]
    contents: bytes

    @classmethod
    def of(cls, weight: torch.Tensor) -> Origin:
        """The origin of a copy that is made now, of a weight on the CPU that is contiguous."""
        layout = (weight.shape, weight.stride(), weight.dtype, weight.device)
        return cls(_place_of(weight), layout, _word_sums(weight).numpy().tobytes())


class Held(NamedTuple):
    """The copy of one weight, or None if it can't be packed, and the inputs it is faster for."""

    origin: Origin
    copy: Copy | None
    least_tokens: int = 1
    most_tokens: int | None = None


class Slot:
    """Where the copy of one layer is, once it has one."""

    held: Held | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Slot:
        """A layer that is copied while it is in use has no copy of its weight yet."""
        return Slot()

    def copy_for(self, weight: torch.Tensor, num_tokens: int) -> Copy | None:
        """The copy, if it is of this weight and the faster way for that number of tokens."""
        held = self.held
        if held is None or held.origin.place != _place_of(weight):
            return None
        is_narrow = held.most_tokens is None or num_tokens <= held.most_tokens
        return held.copy if is_narrow and num_tokens >= held.least_tokens else None


class _ThisThread(threading.local):
    is_inside = False


_this_thread = _ThisThread()


class _StandIn:
    """Replaces one layer's `forward` while it is put into the layer."""

    def __init__(self, module: nn.Linear, slot: Slot) -> None:
        self._module = module
        self._slot = slot

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        if not _this_thread.is_inside or not (num_tokens := x.numel() // x.shape[-1]):
            return linear(x, weight, bias)
        copy = self._slot.copy_for(weight, num_tokens)
        return own_linear(x, weight, bias) if copy is None else packed_linear(x, weight, bias, copy)


class _InPlace:
    """One layer's `forward` for good, from a copy that has taken the place of the weight."""

    def __init__(self, bias: torch.Tensor | None, copy: Copy) -> None:
        self._bias = bias
        self._copy = copy

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 1:
            return self._copy(x, self._bias)
        return self._copy(x[None], self._bias)[0]


class StandIns:
    """The stand-ins that are in a model's layers while at least one thread uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._put: set[nn.Linear] = set()

    @contextmanager
    def put(self, slots: Mapping[nn.Linear, Slot]) -> Iterator[None]:
        """Inside, and in this thread alone, layers compute from the copies in their slots."""
        with self._lock:
            self._num_inside += 1
            for module, slot in slots.items():
                if _has_own_forward(module):
                    vars(module)["forward"] = _StandIn(module, slot)
                    self._put.add(module)
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
            if _has_own_forward(module):  # Other code may have replaced it.
                vars(module).pop("forward", None)
        self._put.clear()


def put_in_place(module: nn.Linear, copy: Copy) -> None:
    """Lets a layer compute from a copy for good, and frees its weight, which then reads as NaN.

    For models alone that nobody can save, move or train, and whose weights are in files.
    """
    vars(module)["forward"] = _InPlace(module.bias, copy)
    weight = module.weight
    weight.data = weight.new_full((), math.nan).expand(weight.shape)


def linears_of(model: nn.Module) -> list[nn.Linear]:
    """The model's plain linear layers; none if the model is compiled.

    Leaves out quantised layers and layers whose `forward` other code has replaced.
    """
    found = []
    for module in model.modules():
        if is_compiled(module):
            return []
        if type(module) is nn.Linear and _has_own_forward(module):
            found.append(module)
    return found


def kinds_of(modules: Sequence[nn.Linear]) -> Kinds:
    """Those of the layers that can be packed, by kind."""
    kinds: Kinds = {}
    for module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and _is_plain(weight):
            kind = Kind(weight.shape[0], weight.shape[1], weight.dtype)
            kinds.setdefault(kind, []).append(module)
    return kinds


def _place_of(weight: torch.Tensor) -> tuple[int, int]:
    return weight.data_ptr(), num_writes(weight)


def _word_sums(weight: torch.Tensor) -> torch.Tensor:
    """The weight's bits as integers, of which every n-th is summed up.

    Two integers of the same row or column never go into the same sum, since n shares no factor with
    their number in a row and exceeds that and the number of rows. So a value that moves is seen.
    """
    num_rows, num_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
    size = math.gcd(8, num_bytes, weight.storage_offset() * weight.element_size())
    words = weight.detach().view(-1).view(_WORDS[size])
    n = max(num_rows, num_bytes // size) + 1
    while math.gcd(n, num_bytes // size) > 1:
        n += 1
    whole = len(words) // (_AT_ONCE * n) * _AT_ONCE * n
    sums = words[:whole].view(-1, _AT_ONCE, n).sum(1).sum(0)
    for rest in torch.split(words[whole:], n):
        sums[: len(rest)] += rest
    return sums


def _has_own_forward(module: nn.Linear) -> bool:
    """Whether nothing but a stand-in of ours has replaced the layer's `forward`."""
    own = vars(module).get("forward")
    return own is None or isinstance(own, _StandIn)


def _is_plain(weight: nn.Parameter) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and bool(ways_for(weight.dtype))
    )

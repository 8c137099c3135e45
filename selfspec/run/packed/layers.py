"""The linear layers of a model that can be packed, and the stand-ins for their `forward`."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.compat.modules import is_compiled
from selfspec.run.packed.linears import Copy, own_linear, packed_linear, ways_for
from selfspec.run.packed.trials import Kind

__all__ = ["Kinds", "Slot", "StandIns", "kinds_of", "linears_of", "put_in_place", "row_sums"]

_LEAST_WEIGHTS = 1 << 16  # In a smaller layer, the call costs more than the product.

Kinds: TypeAlias = dict[Kind, list[nn.Linear]]


class Slot:
    """Where the copy of one layer is, once it has one; it is up to date for these row sums."""

    def __init__(self) -> None:
        self.copy: Copy | None = None
        self.least_tokens = 1
        self.most_tokens: int | None = None
        self._address = 0
        self._sums: torch.Tensor | None = None

    def fill(
        self, weight: torch.Tensor, copy: Copy, least_tokens: int, most_tokens: int | None
    ) -> None:
        """From now on, inputs of as many tokens as these are computed from the copy."""
        self._address, self._sums = weight.data_ptr(), row_sums(weight)
        self.least_tokens, self.most_tokens = least_tokens, most_tokens
        self.copy = copy

    def is_outdated(self, weight: torch.Tensor) -> bool:
        """Whether the weight has changed since the copy was made."""
        if self.copy is None or self._sums is None:
            return False
        return weight.data_ptr() != self._address or not torch.equal(row_sums(weight), self._sums)

    def copy_for(self, num_tokens: int) -> Copy | None:
        """The copy, if it is the faster way for that number of tokens."""
        is_narrow = self.most_tokens is None or num_tokens <= self.most_tokens
        return self.copy if is_narrow and num_tokens >= self.least_tokens else None


class _ThisThread(threading.local):
    is_inside = False


_this_thread = _ThisThread()


class _StandIn:
    """Replaces one layer's `forward` while it is put into the layer."""

    def __init__(self, module: nn.Linear, slot: Slot) -> None:
        self._module = module
        self._slot = slot

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self._module
        if not _this_thread.is_inside or not (num_tokens := x.numel() // x.shape[-1]):
            return linear(x, module.weight, module.bias)
        copy = self._slot.copy_for(num_tokens)
        if copy is None:
            return own_linear(x, module.weight, module.bias)
        return packed_linear(x, module.weight, module.bias, copy)


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
        self._put: list[nn.Linear] = []

    @contextmanager
    def put(self, slots: Mapping[nn.Linear, Slot]) -> Iterator[None]:
        """Inside, and in this thread alone, layers compute from the copies in their slots."""
        with self._lock:
            self._num_inside += 1
            for module, slot in slots.items():
                if "forward" not in vars(module):
                    vars(module)["forward"] = _StandIn(module, slot)
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
            # Other code may have replaced it.
            if isinstance(vars(module).get("forward"), _StandIn):
                del vars(module)["forward"]
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
        own = vars(module).get("forward")
        if is_compiled(module):
            return []
        if type(module) is nn.Linear and (own is None or isinstance(own, _StandIn)):
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


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """The sum of each row's bits, read as the longest integers that fill the row."""
    num_bytes = weight.shape[1] * weight.element_size()
    words = torch.int64 if num_bytes % 8 == 0 else torch.int16 if num_bytes % 2 == 0 else torch.int8
    return weight.detach().view(words).sum(-1)


def _is_plain(weight: nn.Parameter) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and bool(ways_for(weight.dtype))
    )

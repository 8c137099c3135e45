"""Packed copies of the weights of linear layers: how they are made, and how layers use them.

Knows tensors, layers and torch's CPU libraries; not when packing pays.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from selfspec.compat.kernels import (
    float16_packed,
    float16_product,
    float16_unpacked,
    reordered,
    reordered_product,
)
from selfspec.compat.modules import encoder_of, is_compiled, is_for_a_parameter, num_writes
from selfspec.errors import UnsupportedError
from selfspec.weights.held_weight import HeldWeight, read, refuse_write, set_data, weights_in

__all__ = [
    "CopySlot",
    "Origin",
    "PackedMatrix",
    "PackedWeight",
    "SlotContent",
    "StandIns",
    "gives_rows",
    "linears_of",
    "own_linear",
    "pack_all",
    "packed_linear",
    "ways_for",
]

_log = logging.getLogger("selfspec")

_HALVES = (torch.bfloat16, torch.float16)
_TRIED = 8  # The rows and columns of a small product that is tried.
_PART = 1 << 24  # A float16 copy is made of parts of at most this many weights.
# Without a copy, half precision is widened for inputs of at least this many tokens, in blocks of at
# most this many weights, which fit into the CPU's cache.
_WIDE = 32
_BLOCK = 1 << 20
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_AT_ONCE = 8  # Rows of words that are added up at once, which the memory can keep pace with.


@runtime_checkable
class ByRows(Protocol):
    """A packed copy whose rows can be read one by one, as an embedding does."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the weight that belong to these ids."""
        ...


def gives_rows(weight: torch.Tensor) -> bool:
    """Can an embedding read single rows of this weight, without making all its values anew?"""
    return type(weight) is nn.Parameter or isinstance(getattr(weight, "packed", None), ByRows)


class PackedMatrix(Protocol):
    """A packed copy of one weight (O, I), which takes as much memory as the weight."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`linear(x, weight, bias)` for an input (..., I) of the weight's dtype."""
        ...

    def unpacked(self) -> torch.Tensor:
        """The weight; values that float16 can't hold come back rounded."""
        ...


def ways_for(dtype: torch.dtype) -> list[str]:
    """The ways in which this build of torch can pack weights of a dtype on this CPU.

    ``"same"`` is a copy in the weight's own dtype. Half precision can also be packed in
    ``"float16"``, from which FBGEMM computes in float32, for CPUs that can't calculate in it.
    """
    possible = _WAYS if dtype in _HALVES else ("same",)
    return [way for way in possible if _is_right(way, dtype)]


def pack_all(way: str, weights: Sequence[torch.Tensor]) -> list[PackedMatrix | None]:
    """A copy of each weight; None for one that has to be used as it is."""
    return _WAYS[way]([weight.detach() for weight in weights])


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, copy: PackedMatrix
) -> torch.Tensor:
    """`linear(x, weight, bias)`, computed from the packed copy, without gradients.

    If the input is a single vector or has another dtype than the weight, or under autocast,
    `linear` itself is called.
    """
    if x.dim() < 2 or x.dtype is not weight.dtype or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    return copy(x, bias)


def own_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear(x, weight, bias)` without a copy.

    A CPU that can't calculate in half precision multiplies token by token. For a prompt it is three
    times as fast to make float32 of the weight, block by block, each time.

    Of an input such as the last token of a prompt, which lies in memory with a gap, torch makes a
    product of batches. In bfloat16 that copied the whole weight of a head of 100 million weights,
    0.65 s instead of 0.01.
    """
    if x.dim() > 2 and not torch.is_autocast_enabled("cpu"):
        return own_linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
    is_slow = x.dtype is weight.dtype and _is_slow(weight.dtype) and x.device.type == "cpu"
    if not is_slow or x.numel() < _WIDE * x.shape[-1] or torch.is_autocast_enabled("cpu"):
        return linear(x, weight, bias)
    wide, num_rows = x.float(), max(_BLOCK // weight.shape[1], 1)
    outcome = torch.cat([linear(wide, part.float()) for part in torch.split(weight, num_rows)], -1)
    if bias is not None:
        outcome.add_(bias)
    return outcome.to(x.dtype)


class _Reordered:
    """A copy in the order that oneDNN wants, in the weight's own dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = reordered(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return reordered_product(x, self._packed, bias)

    def unpacked(self) -> torch.Tensor:
        weight: torch.Tensor = self._packed.to_dense()
        return weight


class _Float16:
    """A copy in float16, from which FBGEMM computes in float32.

    bfloat16 reaches further down than float16, so the weights are multiplied by a power of two
    that brings the largest one near float16's largest number. What is then smaller than 2^-32 times
    the largest weight loses digits.
    """

    def __init__(self, parts: list[object], dtype: torch.dtype, factor: float) -> None:
        self._parts = parts
        self._dtype = dtype
        # Times this, an input becomes float32.
        self._unscale = torch.tensor([1 / factor], dtype=torch.float32, device="cpu")

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = x * self._unscale
        outcomes = [float16_product(wide, part) for part in self._parts]
        outcome = outcomes[0] if len(outcomes) == 1 else torch.cat(outcomes, dim=-1)
        if bias is not None:
            outcome.add_(bias)
        return outcome.to(x.dtype)

    def unpacked(self) -> torch.Tensor:
        parts = [float16_unpacked(part).mul_(self._unscale) for part in self._parts]
        with torch.autocast("cpu", enabled=False):  # It would join no halves.
            return torch.cat([part.to(self._dtype) for part in parts])


@cache
def _is_slow(dtype: torch.dtype) -> bool:
    """Whether this is half precision that FBGEMM can pack and the CPU can't calculate in."""
    return dtype in _HALVES and ways_for(dtype) == ["float16"]


def _same_dtype(weights: Sequence[torch.Tensor]) -> list[PackedMatrix | None]:
    return [_Reordered(weight) for weight in weights]


def _float16_copies(weights: Sequence[torch.Tensor]) -> list[PackedMatrix | None]:
    """FBGEMM packs on one core, so threads pack different parts at the same time.

    What they run starts no OpenMP threads, which would stay and slow down later steps.
    """
    factors = [_factor_for(weight) for weight in weights]
    packable = [(i, weight) for i, weight in enumerate(weights) if factors[i]]
    owned = [(i, part) for i, weight in packable for part in _parts_of(weight)]
    parts: list[list[object]] = [[] for _ in weights]
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as pool:
        for first in range(0, len(owned), num_threads):  # Few are widened at the same time.
            some = owned[first : first + num_threads]
            wide = [part.float() * factors[i] for i, part in some]
            for (i, _), packed in zip(some, pool.map(float16_packed, wide), strict=True):
                parts[i].append(packed)
    each = zip(parts, weights, factors, strict=True)
    return [_Float16(packed, w.dtype, factor) if factor else None for packed, w, factor in each]


# Only private operators of torch pack weights, and any may be missing.
_WAYS: dict[str, Callable[[Sequence[torch.Tensor]], list[PackedMatrix | None]]] = {
    "same": _same_dtype,
    "float16": _float16_copies,
}


def _parts_of(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """The weight in equal parts by rows, so that a large one is packed by several threads."""
    num_rows, num_in = weight.shape
    num_parts = -(-num_rows * num_in // _PART)
    return torch.split(weight, -(-num_rows // num_parts))


def _factor_for(weight: torch.Tensor) -> float:
    """The power of two that brings the largest weight between 2^14 and 2^15; 1 for float16.

    0 if a weight is not finite, for which FBGEMM would put its largest number.
    """
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        return 0.0
    if weight.dtype is torch.float16 or not largest:
        return 1.0
    return 2.0 ** (15 - math.frexp(largest)[1])


@cache
def _is_right(way: str, dtype: torch.dtype) -> bool:
    """Whether small products of this dtype are right, and the weight can be had back."""
    x, weight = torch.ones(2, _TRIED, _TRIED, dtype=dtype, device="cpu")
    try:
        (copy,) = pack_all(way, [weight])
        if copy is None or not torch.equal(copy.unpacked(), weight):
            return False
        return torch.equal(copy(x, weight[0].clone()), (_TRIED + 1) * weight)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


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


class SlotContent(NamedTuple):
    """The copy of one weight, from so many tokens on; None if it can't be packed."""

    origin: Origin
    copy: PackedMatrix | None
    least_tokens: int = 1


class CopySlot:
    """Where the copy of one layer is, once it has one."""

    held: SlotContent | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CopySlot:
        """A layer that is copied while it is in use has no copy of its weight yet."""
        return CopySlot()

    def copy_for(self, weight: torch.Tensor, num_tokens: int) -> PackedMatrix | None:
        """The copy, if it is of this weight and the faster way for that number of tokens."""
        held = self.held
        if held is None or held.origin.place != _place_of(weight):
            return None
        return held.copy if num_tokens >= held.least_tokens else None


class PackedWeight(HeldWeight):
    """The weight of a layer that is held in its packed form alone.

    It has the shape, dtype and device of the weight, and layers compute from the packed form. Code
    that wants the values for anything else gets them back: it finds an ordinary parameter with the
    same values. If a weight is `kept`, such code gets a copy of the values, and can't write. `kept`
    is the message that says so.
    """

    packed: PackedMatrix | None
    kept: str | None
    like: tuple[torch.dtype, int]  # Its dtype and its columns. To ask torch for them takes longer.

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        copy: PackedMatrix,
        kept: str | None,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """What takes the place of a weight, in its dtype or another one."""
        blank = torch.full((), math.nan, dtype=dtype or weight.dtype, device=weight.device)
        made = cls(blank.expand(weight.shape), requires_grad=False)
        made.packed, made.kept = copy, kept
        made.like = (dtype or weight.dtype, weight.shape[1])
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (linear, embedding) and len(args) > 1 and type(args[1]) is cls:
            x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            copy = weight.packed
            if func is embedding and isinstance(copy, ByRows) and kwargs.get("max_norm") is None:
                return copy.rows(x).to(weight.dtype)
            if func is linear and copy is not None and _is_plain_call(x, weight, bias):
                return _packed_product(x, weight, bias, copy)
        if func in _OF_NO_VALUES or (func == _SET_DATA and args[0] is args[1]):
            return _PARAMETER.__torch_function__(func, types, args, kwargs)
        if func in _MOVES:  # To where it is, and as it is, they give the weight itself.
            found = _PARAMETER.__torch_function__(func, types, args, kwargs)
            if found is args[0]:
                return found
        why = None
        for weight in weights_in(PackedWeight, args, kwargs):
            if weight.kept is None:
                weight.give_back()
            else:
                why = weight.kept
                refuse_write(PackedWeight, func, args, kwargs, why)
        if func == torch.Tensor.detach and is_for_a_parameter():
            return _new_parameter(args[0], why)
        args, kwargs = _with_values(args), _with_values(kwargs)
        if why is None:
            return _PARAMETER.__torch_function__(func, types, args, kwargs)
        return read(func, types, args, kwargs, why)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.kept is not None and self.packed is not None:
            return PackedWeight.of(self, self.packed, self.kept)
        self.give_back()
        return _PARAMETER.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.kept is not None:
            return _PARAMETER(self.values(), requires_grad=False).__reduce_ex__(protocol)
        self.give_back()
        return _PARAMETER.__reduce_ex__(self, protocol)

    def values(self) -> torch.Tensor:
        """The weight's values, made anew."""
        assert self.packed is not None
        if self.kept is not None:
            _say_that_it_is_a_copy()
        with torch.inference_mode(False), torch.no_grad():
            return self.packed.unpacked().to(self.dtype)

    def give_back(self) -> None:
        """Becomes an ordinary parameter with the weight's values."""
        with _giving_back:
            if self.packed is None:
                return
            # Other threads may compute from it: it has its values before it stops being packed.
            set_data(self, self.values())
            self.packed = None
            self.__class__ = _PARAMETER


_giving_back = threading.Lock()
_PARAMETER: Any = nn.Parameter  # torch types few of its special methods
_TENSOR: Any = torch.Tensor
_SET_DATA = _TENSOR.data.__set__

# What tells nothing of a weight's values.
_ATTRIBUTES = "device dtype grad grad_fn is_leaf is_meta layout nbytes ndim requires_grad shape"
_METHODS = "__len__ dim element_size is_complex is_floating_point nelement numel size"
_CONVERSIONS = "to cpu float double half bfloat16"
_MOVES = frozenset(getattr(torch.Tensor, name) for name in _CONVERSIONS.split())
_OF_NO_VALUES = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    )
)


def _is_plain_call(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> bool:
    """Is this a product that wants neither gradients nor another dtype than the weight's?"""
    has_gradient = x.requires_grad or (bias is not None and bias.requires_grad)
    if has_gradient and torch.is_grad_enabled():
        return False
    fits = x.dim() and (x.dtype, x.shape[-1]) == weight.like
    return bool(fits) and not torch.is_autocast_enabled("cpu")


def _packed_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, copy: PackedMatrix
) -> torch.Tensor:
    """`linear(x, weight, bias)` for any shape of input, also one without tokens."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], len(weight))
    return copy(x, bias) if x.dim() > 1 else copy(x[None], bias)[0]


def _new_parameter(weight: nn.Parameter, why: str | None) -> nn.Parameter:
    """What `nn.Parameter(weight)` begins with: it is for a weight that can be written."""
    if why is not None:
        raise UnsupportedError(why)
    return nn.Parameter(weight)


@cache
def _say_that_it_is_a_copy() -> None:
    """Once in a process, since code such as `save_pretrained()` reads all weights one by one."""
    _log.warning(
        "code reads weights that are held in packed form: it gets, and saves, copies, with the "
        "rounded values of weights in 8 bits; what it writes to a copy is lost"
    )


def _with_values(value: Any) -> Any:
    """An argument of a function, with copies of the values of packed weights."""
    if isinstance(value, PackedWeight):
        return value.values()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_with_values, value))
    if isinstance(value, dict):
        return {name: _with_values(each) for name, each in value.items()}
    return value


class _ThisThread(threading.local):
    is_inside = False


_this_thread = _ThisThread()


class _StandIn:
    """Replaces one layer's `forward` while it is put into the layer."""

    def __init__(self, module: nn.Linear, copy: CopySlot) -> None:
        self._module = module
        self._copy = copy

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        num_tokens = x.numel() // x.shape[-1] if _this_thread.is_inside else 0
        if not num_tokens or type(weight) is PackedWeight:
            return linear(x, weight, bias)
        copy = self._copy.copy_for(weight, num_tokens)
        return own_linear(x, weight, bias) if copy is None else packed_linear(x, weight, bias, copy)


class StandIns:
    """The stand-ins that are in a model's layers while at least one thread uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._put: set[nn.Linear] = set()

    @contextmanager
    def put(self, copies: Mapping[nn.Linear, CopySlot]) -> Iterator[None]:
        """Inside, and in this thread alone, layers compute from their copies."""
        with self._lock:
            self._num_inside += 1
            for module, copy in copies.items():
                if _has_own_forward(module):
                    vars(module)["forward"] = _StandIn(module, copy)
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


def linears_of(model: nn.Module) -> list[nn.Linear]:
    """The model's plain linear layers; none if the model is compiled.

    Leaves out quantised layers, layers whose `forward` other code has replaced, and those of an
    encoder, which no step runs.
    """
    encoder = encoder_of(model)
    found, unused = [], set() if encoder is None else set(encoder.modules())
    for module in model.modules():
        if is_compiled(module):
            return []
        if type(module) is nn.Linear and _has_own_forward(module) and module not in unused:
            found.append(module)
    return found


def _has_own_forward(module: nn.Linear) -> bool:
    """Whether nothing but a stand-in of ours has replaced the layer's `forward`."""
    own = vars(module).get("forward")
    return own is None or isinstance(own, _StandIn)


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

"""Who packs the weights of a model, and when: once that pays, as timing a few products shows.

A model of ours is packed when it is loaded, any other once the forwards so far would have saved as
much time as packing takes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from selfspec.machine.busy import LEAST_SHARE, processor_share
from selfspec.machine.memory import free_memory, return_freed_memory
from selfspec.weights.copies import Origin, PackedCopy, StandIns, linears_of, num_owners
from selfspec.weights.formats import PackedMatrix, Packer, packers_for
from selfspec.weights.held_weight import PackedWeight, is_packed_in_place
from selfspec.weights.product_times import SAMPLE, WIDE, ProductTimes, product_times

_log = logging.getLogger("selfspec")

_DUE = 640  # Timing takes as long as 64 forwards over the weights that are timed.
_LEAST_WEIGHTS = 1 << 16  # In a smaller layer, the call costs more than the product.
_SHARE_OF_FREE = 0.25  # Unless the user asks for them, copies take at most this share.
_SHOWN = 2.0  # After this many seconds, a progress bar is shown.
_AT_ONCE = 1 << 25  # About this many weights are packed between two updates of the bar.

_lock = threading.Lock()
_shared: WeakKeyDictionary[nn.Module, ref[Packing]] = WeakKeyDictionary()
# Of models that we have loaded. Their copies live as long as the model.
_loaded: WeakKeyDictionary[nn.Module, Packing] = WeakKeyDictionary()


def pack_loaded(model: PreTrainedModel, kept: str | None, *, copies: bool) -> None:
    """Packs the weights of a model that was just loaded, if that pays.

    They are packed in place where no other module has the weight, else beside it, if there may be
    `copies`. With `kept`, a message, they are never given back. The output head is left out then,
    since code that reads its rows could not make it an ordinary weight again.
    """
    _loaded[model] = packing = Packing.of(model)
    packing.may_copy = copies
    head = None if kept is None else model.get_output_embeddings()
    owners = num_owners(model)
    layers = [m for m in linears_of(model) if m is not head and owners[id(m.weight)] == 1]
    packing.pack_in_place(layers, kept)
    packing.renew(model)
    if copies and packing.is_packed:
        _leave_mapped_file(model)
    packing.pack()
    return_freed_memory()


def _leave_mapped_file(model: PreTrainedModel) -> None:
    """Copies what is not packed: while one weight is a view of a file, all of it may be held."""
    for weight in model.parameters():
        if type(weight) is nn.Parameter and weight.device.type == "cpu":
            weight.data = weight.data.clone()


class Packing:
    """The packed weights of one model, which all users of the model share, in any thread.

    Copies are freed with the last of the users. Weights that were packed in place stay so.
    """

    def __init__(self) -> None:
        self.may_copy = True  # May there be packed copies beside weights?
        self.is_packed = False  # Is any layer packed? Other threads read it.
        self.packing_is_over = False  # Is there nothing left to do in the calls at hand?
        self._lock = threading.Lock()
        self._stand_ins = StandIns()
        self._copies: dict[nn.Linear, PackedCopy] = {}
        self._is_in_place = False  # Is any layer packed in place?
        self._layers: list[nn.Linear] = []  # The linear layers that are not packed in place.
        self._packable: list[nn.Linear] = []  # Those of them that torch can pack, of one dtype.
        self._known_times: dict[torch.dtype, ProductTimes] = {}
        self._num_forwards = 0.0  # One over many tokens counts as several.
        self._next_look = 0.0  # in forwards over the weights that are timed

    @classmethod
    def of(cls, model: nn.Module) -> Packing:
        """The model's packing, with the model's layers as they are now.

        Drops the copies of weights that have changed. They are packed again once that pays. Weights
        can change between two calls without a trace in torch, for example when adapters are merged.
        So packed weights are summed up, which takes a part of a plain step's time.
        """
        with _lock:
            known = _shared.get(model)
            packing = known() if known is not None else None
            if packing is None:
                packing = cls()
                _shared[model] = ref(packing)
        packing.renew(model)
        return packing

    @torch.no_grad()
    def renew(self, model: nn.Module) -> None:
        with self._lock:
            layers = linears_of(model)
            self._layers = [module for module in layers if not is_packed_in_place(module)]
            self._is_in_place = len(self._layers) < len(layers)
            self._packable = _packable(self._layers)
            self._drop_changed()
            self._note_packed()
            can_copy = self.may_copy and bool(self._packable)
            self.packing_is_over = not can_copy or (self._times is not None and not self._missing)

    @torch.no_grad()
    def pack_in_place(self, layers: Container[nn.Linear], kept: str | None) -> None:
        """Packs those of some layers that get faster, if their weights come back bit by bit."""
        with self._lock:
            self._time()
            times = self._times
            if times is None or not times.suits_in_place:
                return
            for part in _in_parts([module for module in self._packable if module in layers]):
                for module, matrix in zip(part, _matrices(times.packer, part), strict=True):
                    if matrix is not None and torch.equal(matrix.unpacked(), module.weight):
                        module.weight = PackedWeight.of(module.weight, matrix, kept)

    @property
    def num_bytes(self) -> int:
        """How many bytes the copies take, the weights not counted."""
        return sum(m.weight.nbytes for m, copy in list(self._copies.items()) if copy.matrix)

    def in_use(self) -> AbstractContextManager[None]:
        """Inside, in this thread alone, layers compute from their copies once they have them."""
        return self._stand_ins.put(self._layers, self._copies)

    def before_forward(self, num_tokens: int) -> None:
        """Counts a forward over this many tokens of all rows; packs before it if that pays."""
        if self.packing_is_over:
            return
        with self._lock:
            self._num_forwards += max(num_tokens / WIDE, 1.0)
            work = self._num_forwards * max(_num_weights(self._packable) / SAMPLE, 1.0)
            if self._times is None and work >= max(_DUE, self._next_look):
                self._next_look = work + _DUE
                self._time()
            if self._pays():
                self._pack(whatever_memory=False)

    def pack(self, *, whatever_memory: bool = False) -> str | None:
        """Packs all layers now, if they get faster; returns why none is packed, or None."""
        with self._lock:
            self._time()
            reason = self._pack(whatever_memory=whatever_memory)
            if self.is_packed:
                return None
            return reason or "no layer can be packed, or none is at least 10 % faster packed"

    @property
    def _times(self) -> ProductTimes | None:
        """What products with the layers that torch can pack take; None if that is not known."""
        return self._known_times.get(self._packable[0].weight.dtype) if self._packable else None

    @property
    def _missing(self) -> list[nn.Linear]:
        """The layers that would be faster packed and are not."""
        times = self._times
        if not self.may_copy or times is None or not times.is_faster:
            return []
        return [module for module in self._packable if module not in self._copies]

    def _pays(self) -> bool:
        """Would it have paid for the forwards so far to pack the layers?"""
        times = self._times
        return times is not None and self._num_forwards * times.saved >= times.packing

    def _note_packed(self) -> None:
        self.is_packed = self.num_bytes > 0 or self._is_in_place

    @torch.no_grad()
    def _time(self) -> None:
        """Times the layers, if that was not done yet.

        Times by which nothing is faster packed are forgotten if the processor is busy after them.
        """
        if self._times is not None or not self._packable:
            return
        weights = [module.weight for module in self._packable]
        dtype, start = weights[0].dtype, perf_counter()
        times = product_times(weights)
        _log.info("timed %s in %.2f s: %s", dtype, perf_counter() - start, times)
        if times.is_faster or processor_share() >= LEAST_SHARE:
            self._known_times[dtype] = times

    @torch.no_grad()
    def _pack(self, *, whatever_memory: bool) -> str | None:
        """Packs what is missing, some layers at a time, so that what is interrupted stays right.

        Returns a reason if copies would take too much memory.
        """
        times, missing = self._times, self._missing
        if times is None:
            return None
        self.packing_is_over, num_bytes = True, _num_bytes(missing)
        if not whatever_memory and num_bytes > _SHARE_OF_FREE * free_memory():
            return f"packed weights would take {num_bytes / 1e6:.0f} MB, too much of what is free"
        for part in _in_parts(missing):
            origins = [Origin.of(m.weight) for m in part]  # What is written now is seen later.
            for module, origin, matrix in zip(
                part, origins, _matrices(times.packer, part), strict=True
            ):
                self._copies[module] = PackedCopy(origin, matrix, times.least_tokens)
        self._note_packed()
        return None

    def _drop_changed(self) -> None:
        """Drops copies that are not of a layer's weight as it is, and counts forwards from here.

        So weights that change with each call, as in training, are packed again only if that pays.
        """
        packable = set(self._packable)
        for module, copy in list(self._copies.items()):
            if module not in packable or copy.origin != Origin.of(module.weight):
                del self._copies[module]
                self._num_forwards = self._next_look = 0.0


def _packable(modules: Sequence[nn.Linear]) -> list[nn.Linear]:
    """The layers that torch can pack, of the dtype that most of them have."""
    possible = [module for module in modules if _can_be_packed(module)]
    dtypes = Counter(module.weight.dtype for module in possible)
    dtype = max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
    return [module for module in possible if module.weight.dtype is dtype]


def _can_be_packed(module: nn.Linear) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and bool(packers_for(weight.dtype))
    )


def _matrices(packer: Packer, modules: Sequence[nn.Linear]) -> list[PackedMatrix | None]:
    with torch.inference_mode(False):
        return packer([module.weight for module in modules])


def _num_weights(modules: Sequence[nn.Linear]) -> int:
    return sum(module.weight.numel() for module in modules)


def _num_bytes(modules: Sequence[nn.Linear]) -> int:
    return sum(module.weight.nbytes for module in modules)


def _in_parts(modules: Sequence[nn.Linear]) -> Iterator[list[nn.Linear]]:
    """The layers in parts of about as many weights as are packed at once.

    A bar shows how many were packed, if that takes long.
    """
    if not modules:
        return
    start, num_bytes = perf_counter(), _num_bytes(modules)
    options = {"unit": "B", "unit_scale": True, "delay": _SHOWN}
    with hf_logging.tqdm(total=num_bytes, desc="Packing weights", **options) as bar:
        part: list[nn.Linear] = []
        for module in modules:
            part.append(module)
            if _num_weights(part) >= _AT_ONCE or module is modules[-1]:
                yield part
                bar.update(_num_bytes(part))
                part = []
    _log.info("packed %.0f MB of weights in %.2f s", num_bytes / 1e6, perf_counter() - start)

"""When the weights of a model are packed: once that pays, as timing a few layers shows.

Weights are packed if that cuts the time of products by at least 10 %. A model of ours is packed
when it is loaded, any other once the forwards so far would have saved as much time as that takes,
or eight times as much while other programs need the processor.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from transformers.utils import logging as hf_logging

from selfspec.machine.busy import LEAST_SHARE, processor_share
from selfspec.machine.memory import free_memory, return_freed_memory
from selfspec.weights.copies import (
    CopySlot,
    SlotContent,
    Origin,
    PackedWeight,
    StandIns,
    linears_of,
    own_linear,
    pack_all,
    ways_for,
)

__all__ = [
    "InPlace",
    "Packing",
    "ProductTimes",
    "is_packed_in_place",
    "own_memory",
    "pack_loaded",
]

_log = logging.getLogger("selfspec")

_PLAIN, _WIDE = 1, 8  # Tokens of a plain step, and of a step with drafts: both are timed.
_PAYS = 0.9  # Pack only if that cuts their time by at least 10 %.
_EQUAL = 1.02  # Copies are used for a single token only if it takes at most 2 % longer.
_NEARLY = 1.25  # In place, it may take this much longer than with the weight as it was.
_SAMPLE = 1 << 23  # So many weights are timed: they leave the CPU's cache between two products.
_PARTS = 8  # They are parts of this many layers, or of more.
_ROUNDS = 3
# Timing takes about as long as a tenth of this many forwards over the weights that are timed. It is
# done once the model was asked for as much. If nothing was faster then, another program may have
# been in the way: it is done again after several times as much. On a busy machine, timing and
# packing take up to ten times as long. They wait for a quiet moment until that is paid for, too.
_DUE, _LATER, _TRIES = 640, 8, 3
_LEAST_WEIGHTS = 1 << 16  # In a smaller layer, the call costs more than the product.
_SHARE_OF_FREE = 0.25  # Unless the user asks for them, copies take at most this share.
_SHOWN = 2.0  # What takes longer than this many seconds is shown.
_AT_ONCE = 1 << 25  # About this many weights are packed between two looks at the clock.

_Layers = dict[torch.dtype, list[nn.Linear]]


class ProductTimes(NamedTuple):
    """Seconds of products for each weight: with one token and with several."""

    own: tuple[float, float]  # As torch computes them.
    way: str | None = None  # How to pack; None: nothing is at least 10 % faster.
    packed: tuple[float, float] = (0.0, 0.0)  # In that way.
    packing: float = 0.0  # To pack.

    @property
    def least_tokens(self) -> int:
        """From how many tokens on copies are used: not for one if that is slower."""
        return 1 if self.packed[0] <= _EQUAL * self.own[0] else 2

    @property
    def suits_in_place(self) -> bool:
        """Does a single token take about as long packed? Stock's own steps compute from it too."""
        return self.packed[0] <= _NEARLY * self.own[0]

    @property
    def saved(self) -> float:
        """What a forward saves."""
        return sum(max(own - new, 0.0) for own, new in zip(self.own, self.packed, strict=True)) / 2


@dataclass(eq=False)
class InPlacePacking:
    """How packed weights take the place of a model's own, for models that we have loaded.

    With `kept`, a message, they are never given back. With `copies`, layers that can't be packed in
    place get copies next to their weight, as in any other model. It `is_over` once weights were
    given back.
    """

    kept: str | None
    copies: bool
    layers: WeakSet[nn.Linear] = field(default_factory=WeakSet)  # that are packed in place
    is_over: bool = False
    packing: Packing | None = None  # Copies live as long as the model.

    def renew(self, layers: Iterable[nn.Linear]) -> None:
        """Looks at the model's layers as they are now."""
        if not self.is_over and not all(map(is_packed_in_place, self.layers)):
            _log.warning("other code read weights that were packed, so they were given back")
            self.is_over = True
        self.layers = WeakSet(filter(is_packed_in_place, layers))


_lock = threading.Lock()
_shared: WeakKeyDictionary[nn.Module, ref[Packing]] = WeakKeyDictionary()
_in_place: WeakKeyDictionary[nn.Module, InPlacePacking] = WeakKeyDictionary()


def is_packed_in_place(module: nn.Module) -> bool:
    """Does a layer hold its weight in packed form alone?"""
    return type(getattr(module, "weight", None)) is PackedWeight


def pack_loaded(model: nn.Module, how: InPlacePacking) -> None:
    """Packs the weights of a model that was just loaded in place, if that pays."""
    _in_place[model] = how
    how.packing = Packing.of(model)
    how.packing.pack()
    return_freed_memory()


def own_memory(model: nn.Module) -> None:
    """Copies the weights that are never packed in place.

    As long as one weight is a view of a mapped file, the whole file may be in memory.
    """
    alone = {id(module.weight) for module in _alone(model, InPlacePacking(kept=None, copies=True))}
    for weight in model.parameters():
        if id(weight) not in alone and weight.device.type == "cpu":
            weight.data = weight.data.clone()


class Packing:
    """The packed weights of one model, which all users of the model share, in any thread.

    Copies are freed with the last of the users. Weights that were packed in place stay so.
    """

    def __init__(self) -> None:
        self.copies: WeakKeyDictionary[nn.Linear, CopySlot] = WeakKeyDictionary()
        self.reason: str | None = None  # why nothing is packed
        # Whether all layers that get faster are packed, and some do. Other threads read it.
        self.is_packed = False
        self.packing_is_over = False  # Is there nothing left to do in the calls at hand?
        self._times: dict[torch.dtype, ProductTimes] = {}
        self._lock = threading.Lock()
        self._stand_ins = StandIns()
        self._num_forwards = 0.0  # One over many tokens counts as several.
        self._due: list[float] = [_DUE * _LATER**number for number in range(_TRIES)]
        self._was_busy_at: float | None = None  # in forwards over the weights that are timed
        self._layers: _Layers = {}  # that can be packed
        self._in_use: dict[nn.Linear, CopySlot] = {}
        self._how: InPlacePacking | None = None
        self._alone: set[nn.Linear] = set()  # may be packed in place

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
    def renew(self, model: Any) -> None:
        """Looks at the model's layers as they are now."""
        with self._lock:
            layers, self._how = linears_of(model), _in_place.get(model)
            if self._how is not None:
                self._how.renew(layers)
                self._alone = _alone(model, self._how)
            linears = [module for module in layers if not is_packed_in_place(module)]
            self._layers = _packable(linears)
            self._in_use = {
                module: self.copies.setdefault(module, CopySlot()) for module in linears
            }
            self._drop_changed()
            nothing = "it has no plain linear layers that torch can pack"
            self.reason = None if self._layers or self._is_in_place() else nothing
            self._note_packed()
            self.packing_is_over = self._knows_all() and not self._missing()

    @property
    def num_bytes(self) -> int:
        """How many bytes the copies take, the weights not counted."""
        held = [(module, copy.held) for module, copy in list(self.copies.items())]
        return sum(module.weight.nbytes for module, each in held if each and each.copy)

    def in_use(self) -> AbstractContextManager[None]:
        """Inside, in this thread alone, layers compute from their copies once they have them."""
        return self._stand_ins.put(self._in_use)

    def before_forward(self, num_tokens: int) -> None:
        """Counts a forward over this many tokens of all rows; packs before it if that pays."""
        if self.packing_is_over:
            return
        with self._lock:
            self._num_forwards += max(num_tokens / _WIDE, 1.0)
            if self._pays() and (self._pays(times=_LATER) or self._is_quiet()):
                self._time_all()
                if self._knows_all() and self._pays():
                    self._pack_all(whatever_memory=False)
                self._note_packed()

    def _pays(self, *, times: int = 1) -> bool:
        """Would the forwards so far pay so many times for packing, or for timing if that is due?"""
        if not self._knows_all():
            return self._done >= times * self._due[0]
        saved = self._num_forwards * self._seconds(self._layers, "saved")
        return saved >= times * self._seconds(self._missing(), "packing")

    @property
    def _done(self) -> float:
        """The work so far, in forwards over the weights that are timed."""
        num_weights = sum(map(_num_weights, self._layers.values()))
        return self._num_forwards * num_weights / max(min(num_weights, _SAMPLE), 1)

    def _is_quiet(self) -> bool:
        """Do other programs leave us the processor? A look takes 0.05 s, so few are taken."""
        if self._was_busy_at is not None and self._done < self._was_busy_at + _DUE:
            return False
        is_busy = processor_share() < LEAST_SHARE
        self._was_busy_at = self._done if is_busy else None
        return not is_busy

    def pack(self, *, whatever_memory: bool = False) -> str | None:
        """Packs all layers now, if they get faster; returns why they are not packed, or None."""
        with self._lock:
            self._time_all()
            if self._knows_all():
                self._pack_all(whatever_memory=whatever_memory)
            self._note_packed()
        return self.reason

    def _note_packed(self) -> None:
        is_any = self._is_in_place() or self.num_bytes > 0
        self.is_packed = is_any and self._knows_all() and not self._missing()
        self.reason = None if self.is_packed else self.reason

    def _knows_all(self) -> bool:
        return self._layers.keys() <= self._times.keys()

    @torch.no_grad()
    def _time_all(self) -> None:
        """Times the layers that were not timed yet; ends the matter if none gets faster at last."""
        for dtype, modules in self._layers.items():
            if dtype not in self._times:
                start = perf_counter()
                found = self._times[dtype] = product_times([module.weight for module in modules])
                _log.info("timed %s in %.2f s: %s", dtype, perf_counter() - start, found)
        if not self._is_in_place() and not any(self._times[each].way for each in self._layers):
            self.reason = self.reason or "no layer is at least 10 % faster packed"
            self.packing_is_over = len(self._due) == 1 or not self._layers
            if not self.packing_is_over:
                self._times.clear()
                del self._due[0]

    def _seconds(self, layers: _Layers, what: str) -> float:
        """What the layers take to pack, or save in a forward."""
        numbers = {dtype: _num_weights(modules) for dtype, modules in layers.items()}
        return float(sum(n * getattr(self._times[dtype], what) for dtype, n in numbers.items()))

    def _missing(self) -> _Layers:
        """The layers that would be faster packed and are not."""
        missing = {}
        for dtype, modules in self._layers.items():
            if dtype not in self._times or self._times[dtype].way is None:
                continue
            copies = self._how is None or self._how.copies
            without = [
                module
                for module in modules
                if not is_packed_in_place(module)
                and self._in_use[module].held is None
                and (copies or self._goes_in_place(module))
            ]
            if without:
                missing[dtype] = without
        return missing

    def _is_in_place(self) -> bool:
        return self._how is not None and bool(self._how.layers)

    def _goes_in_place(self, module: nn.Linear) -> bool:
        return module in self._alone and self._times[module.weight.dtype].suits_in_place

    @torch.no_grad()
    def _pack_all(self, *, whatever_memory: bool) -> None:
        """Packs what is missing, some layers at a time, so that what is interrupted stays right."""
        self.packing_is_over = True
        missing = self._missing()
        in_place = {
            dtype: list(filter(self._goes_in_place, modules)) for dtype, modules in missing.items()
        }
        more = _num_bytes(missing) - _num_bytes(in_place)
        if not whatever_memory and more > _SHARE_OF_FREE * free_memory():
            amount = f"{more / 1e6:.0f} MB"
            self.reason = f"packed weights would take {amount}, too much of what is free"
            missing = in_place
        num_bytes = _num_bytes(missing)
        if not num_bytes:
            return
        start, price = perf_counter(), self._seconds(missing, "packing")
        options = {"unit": "B", "unit_scale": True, "disable": price < _SHOWN}
        with hf_logging.tqdm(total=num_bytes, desc="Packing weights", **options) as bar:
            for modules in missing.values():
                for some in _in_parts(modules):
                    self._fill(some)
                    bar.update(_num_bytes({some[0].weight.dtype: some}))
        _log.info("packed %.0f MB of weights in %.2f s", num_bytes / 1e6, perf_counter() - start)

    def _drop_changed(self) -> None:
        """Drops copies that are not of a layer's weight as it is, and counts forwards from here.

        So weights that change with each call, as in training, are packed again only if that pays.
        """
        packable = {module for modules in self._layers.values() for module in modules}
        for module, copy in self._in_use.items():
            if copy.held is not None and (
                module not in packable or copy.held.origin != Origin.of(module.weight)
            ):
                copy.held = None
                self._num_forwards = 0.0

    def _fill(self, modules: Sequence[nn.Linear]) -> None:
        """Packs some layers of one dtype."""
        weights = [module.weight for module in modules]
        times = self._times[weights[0].dtype]
        origins = [Origin.of(weight) for weight in weights]  # What is written now is seen later.
        with torch.inference_mode(False):
            copies = pack_all(str(times.way), weights)
        for module, origin, copy in zip(modules, origins, copies, strict=True):
            if self._goes_in_place(module):
                # What does not come back bit by bit stays as it is.
                assert self._how is not None
                if copy is not None and torch.equal(copy.unpacked(), module.weight):
                    module.weight = PackedWeight.of(module.weight, copy, self._how.kept)
                    self._how.layers.add(module)
                    continue
                copy = None
            self._in_use[module].held = SlotContent(origin, copy, times.least_tokens)


def _packable(modules: Sequence[nn.Linear]) -> _Layers:
    """Those of the layers that can be packed, by the dtype of their weight."""
    layers: _Layers = {}
    for module in modules:
        weight = getattr(module, "weight", None)
        if type(weight) is nn.Parameter and _can_be_packed(weight):
            layers.setdefault(weight.dtype, []).append(module)
    return layers


def _can_be_packed(weight: torch.Tensor) -> bool:
    return (
        weight.is_contiguous()
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and bool(ways_for(weight.dtype))
    )


def _alone(model: Any, how: InPlacePacking) -> set[nn.Linear]:
    """The layers that may be packed in place: no other layer has their weight.

    The output head keeps a weight that could not be given back.
    """
    if how.is_over:
        return set()
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings() if how.kept else None
    return {m for m in linears_of(model) if m is not head and owners[id(m.weight)] == 1}


def _num_weights(modules: Sequence[nn.Linear]) -> int:
    return sum(module.weight.numel() for module in modules)


def _num_bytes(layers: Mapping[torch.dtype, Sequence[nn.Linear]]) -> int:
    return sum(_num_weights(modules) * dtype.itemsize for dtype, modules in layers.items())


def _in_parts(modules: Sequence[nn.Linear]) -> Iterator[list[nn.Linear]]:
    """The layers in parts of about as many weights as are packed at once."""
    part: list[nn.Linear] = []
    for module in modules:
        if part and _num_weights([*part, module]) > _AT_ONCE:
            yield part
            part = []
        part.append(module)
    yield part


def product_times(weights: Sequence[torch.Tensor]) -> ProductTimes:
    """Times some layers of one dtype in all ways, in turns. Draws no randomness."""
    sample = _sample(weights)
    number = sum(weight.numel() for weight in sample)
    layers: dict[str | None, list[Callable[[torch.Tensor], object]]]
    layers = {None: [partial(own_linear, weight=weight, bias=None) for weight in sample]}
    packing: dict[str, float] = {}
    for way in ways_for(sample[0].dtype):
        start = perf_counter()
        with suppress(RuntimeError):
            copies = [copy for copy in pack_all(way, sample) if copy]
            if len(copies) == len(sample):
                packing[way] = (perf_counter() - start) / number
                layers[way] = [partial(copy, bias=None) for copy in copies]
    inputs = [_inputs(sample, num_tokens) for num_tokens in (_PLAIN, _WIDE)]
    rounds = [
        {way: [_seconds(products, each) for each in inputs] for way, products in layers.items()}
        for _ in range(_ROUNDS)
    ]
    times = {
        way: tuple(min(each[way][width] for each in rounds) / number for width in range(2))
        for way in layers
    }
    own: Any = times[None]
    shares = {
        way: sum(min(new / old, 1.0) for new, old in zip(times[way], own, strict=True)) / 2
        for way in packing
    }
    best = min(shares, key=shares.__getitem__, default=None)
    if best is None or shares[best] > _PAYS:
        return ProductTimes(own)
    packed: Any = times[best]
    return ProductTimes(own, best, packed, packing[best])


def _sample(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first layers, or of large ones the first rows."""
    sample: list[torch.Tensor] = []
    for weight in weights:
        if sum(each.numel() for each in sample) >= _SAMPLE:
            break
        sample.append(weight[: max(_SAMPLE // _PARTS // weight.shape[1], 1)])
    return sample


def _inputs(weights: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    return [
        torch.randn(num_tokens, each.shape[1], generator=generator, device="cpu").to(each)
        for each in weights
    ]


def _seconds(
    products: Sequence[Callable[[torch.Tensor], object]], inputs: Sequence[torch.Tensor]
) -> float:
    """The time of all layers in a row."""
    start = perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product(x)
    return perf_counter() - start

"""When the weights of a model are packed: once that would have paid, as a short trial shows.

A layer is packed only if its trial shows that this cuts its time by at least 10 %, and only when
the forwards so far would have saved as much time as packing takes. What trials found is kept on
disk for the processor, torch's version and its number of threads. Beside a busy program all threads
of a product wait for each other, so trials wait too: they would find products slow that are not.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from transformers.utils import logging as hf_logging

from selfspec.machine.busy import is_busy
from selfspec.machine.hardware import processor
from selfspec.machine.measured import find_measured, keep_measured
from selfspec.machine.memory import free_memory
from selfspec.run.packed.copies import (
    Held,
    Origin,
    PackedWeight,
    Slot,
    StandIns,
    linears_of,
    own_linear,
    pack_all,
    ways_for,
)

__all__ = [
    "WIDTHS",
    "InPlace",
    "Kind",
    "Packing",
    "Trial",
    "is_packed_in_place",
    "own_memory",
    "pack_in_place",
]

_log = logging.getLogger("selfspec")

WIDTHS = (1, 4, 16, 64)  # A trial times inputs of this many tokens.
_DECIDE = WIDTHS[:3]  # Steps are as wide as these; 64 stands for a prompt.
_PAYS = 0.9  # Pack a layer only if that cuts its time by at least 10 %.
_EQUAL = 1.02  # The copy is used from the number of tokens on where it takes at most 2 % longer.
_NEARLY = 1.25  # In place, one token may take this much longer than with the weight as it was.
# A trial takes this many weights, so that they leave the CPU's cache between two products.
_MOST_WEIGHTS = 1 << 23
_ROUNDS = 2
# Reading weights takes as long as computing this many tokens, and a trial of weights, with their
# packing, about as long as computing that many. Trials are made once they take about this share of
# the time that products took so far.
_READING = 8
_TRIAL = 250
_SHARE_FOR_TRIALS = 0.25
# A busy machine puts them off until that many times as much is done. Behind that, it may be that we
# never get all threads, as in a container that has fewer processors than torch has threads.
_PATIENCE = 8
_LEAST_WEIGHTS = 1 << 16  # In a smaller layer, the call costs more than the product.
_SHARE_OF_FREE = 0.25  # Unless the user asks for them, copies take at most this share.
_SHOWN = 2.0  # What takes longer than this many seconds is shown.
_AT_ONCE = 1 << 25  # About this many weights are packed between two looks at the clock.

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

    @property
    def num_bytes(self) -> int:
        """What one layer's weight takes, and its packed copy too."""
        return self.num_weights * self.dtype.itemsize


class Trial(NamedTuple):
    """Seconds of one layer's product by its number of tokens, and the way that is faster."""

    own: dict[int, float]  # as torch computes it
    way: str | None  # None: no way is at least 10 % faster
    packed: dict[int, float]  # in that way; empty without one
    packing: float  # seconds to pack the layer

    @property
    def least_tokens(self) -> int:
        """From how many tokens on the copy is used, as far as narrow inputs go."""
        slower = [w for w in _DECIDE if self.packed[w] > _EQUAL * self.own[w]]
        return min(slower[-1] + 1, _DECIDE[-1]) if slower else 1

    @property
    def most_tokens(self) -> int | None:
        """Up to how many tokens the copy is used; None for any number."""
        widest = WIDTHS[-1]
        return None if self.packed[widest] <= self.own[widest] else WIDTHS[-2]

    @property
    def suits_in_place(self) -> bool:
        """Whether a single token takes about as long packed, since stock's steps do so in place."""
        return self.packed[1] <= _NEARLY * self.own[1]

    def saved(self, width: int) -> float:
        """The seconds that a packed layer saves in a forward."""
        return max(self.own[width] - self.packed.get(width, self.own[width]), 0.0)


@dataclass(eq=False)
class InPlace:
    """How packed weights take the place of a model's own, for models that we have loaded.

    With `kept`, they are never given back. With `copies`, layers that can't be packed in place get
    copies beside their weight, as in any other model. It `is_over` once weights were given back.
    """

    kept: bool
    copies: bool
    layers: WeakSet[nn.Linear] = field(default_factory=WeakSet)  # that are packed in place
    is_over: bool = False

    def renew(self, layers: Iterable[nn.Linear]) -> None:
        """Looks at the model's layers as they are now."""
        if not self.is_over and not all(map(is_packed_in_place, self.layers)):
            _log.warning("other code read weights that were packed, so they were given back")
            self.is_over = True
        self.layers = WeakSet(filter(is_packed_in_place, layers))


_lock = threading.Lock()
_shared: WeakKeyDictionary[nn.Module, ref[Packing]] = WeakKeyDictionary()
_in_place: WeakKeyDictionary[nn.Module, InPlace] = WeakKeyDictionary()


def is_packed_in_place(module: nn.Module) -> bool:
    """Does a layer hold its weight in packed form alone?"""
    return type(getattr(module, "weight", None)) is PackedWeight


def pack_in_place(model: nn.Module, how: InPlace) -> None:
    """From now on, whoever packs this model's weights packs them in place."""
    _in_place[model] = how


def own_memory(model: nn.Module) -> None:
    """Copies the weights that are never packed in place.

    As long as one weight is a view of a mapped file, the whole file may be in memory.
    """
    alone = {id(module.weight) for module in _alone(model, InPlace(kept=False, copies=True))}
    for weight in model.parameters():
        if id(weight) not in alone and weight.device.type == "cpu":
            weight.data = weight.data.clone()


class Packing:
    """The packed weights of one model, which all users of the model share, in any thread.

    Copies are freed with the last of the users. Weights that were packed in place stay so.
    """

    def __init__(self) -> None:
        self.slots: WeakKeyDictionary[nn.Linear, Slot] = WeakKeyDictionary()
        self.trials: dict[Kind, Trial] = {}
        self.reason: str | None = None  # why nothing is packed
        # Whether all layers that get faster are packed, and some do. Other threads read it.
        self.is_packed = False
        self.is_settled = False  # Is there nothing left to do in the calls at hand?
        self._lock = threading.Lock()
        self._stand_ins = StandIns()
        self._forwards: Counter[int] = Counter()  # that the model was asked for, by their width
        self._try_from = 0  # Trials come behind this many tokens.
        self._kinds: dict[Kind, list[nn.Linear]] = {}
        self._in_use: dict[nn.Linear, Slot] = {}
        self._how: InPlace | None = None
        self._alone: set[nn.Linear] = set()  # may be packed in place

    @classmethod
    def of(cls, model: nn.Module) -> Packing:
        """The model's packing, with the model's layers as they are now.

        Drops the copies of weights that have changed, and packs the layers anew that can still be
        packed. Weights can change between two calls without a trace in torch, for example when
        adapters are merged. So packed weights are summed up, which takes a part of a plain step's
        time.
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
            self._kinds = _kinds_of(linears)
            for kind in self._kinds.keys() - self.trials.keys():
                if (known := _known_trial(kind)) is not None:  # By an earlier process.
                    self.trials[kind] = known
            self._in_use = {module: self.slots.setdefault(module, Slot()) for module in linears}
            self._drop_changed()
            nothing = "it has no plain linear layers that torch can pack"
            self.reason = None if self._kinds or self._is_in_place() else nothing
            self.is_settled = self._has_all()
            self._note_packed()

    @property
    def num_bytes(self) -> int:
        """How many bytes the copies take beside the weights."""
        held = [(module, slot.held) for module, slot in list(self.slots.items())]
        return sum(module.weight.nbytes for module, each in held if each and each.copy)

    def _note_packed(self) -> None:
        self.is_packed = (self._is_in_place() or self.num_bytes > 0) and self._has_all()

    def _has_all(self) -> bool:
        """Is all that gets faster packed, as far as trials can tell?"""
        return self._knows_all() and not self._missing()

    def in_use(self) -> AbstractContextManager[None]:
        """Inside, in this thread alone, layers compute from their copies once they have them."""
        return self._stand_ins.put(self._in_use)

    def before_forward(self, num_tokens: int, num_left: int = 0) -> None:
        """Counts a forward over this many tokens of all rows; packs before it if that pays.

        Behind it there may come `num_left` more in the call at hand.
        """
        if self.is_settled:
            return
        with self._lock:
            width = next((w for w in WIDTHS if num_tokens <= w), WIDTHS[-1])
            self._forwards[width] += max(round(num_tokens / width), 1)
            if self._knows_all() or self._may_try(num_left):
                self._try_all()
                if self._saved() >= self._price():
                    self._pack_all(whatever_memory=False)
                self._note_packed()

    def pack(self, *, whatever_memory: bool = False) -> str | None:
        """Packs all layers that get faster now; returns why none is, or None."""
        with self._lock:
            self._try_all()
            self._pack_all(whatever_memory=whatever_memory)
            self._note_packed()
        return self.reason

    def _knows_all(self) -> bool:
        return all(kind in self.trials for kind in self._kinds)

    def _may_try(self, num_left: int) -> bool:
        """Did products take so long by now that the time of trials is a small part of it?

        They must have taken twice as long if hardly anything can come behind them in this call.
        While the machine is busy, trials are put off until as much work again is done, three times
        at most.
        """
        sizes = [kind.num_weights * len(modules) for kind, modules in self._kinds.items()]
        tokens = sum(n * max(width, _READING) for width, n in self._forwards.items())
        trials = _TRIAL * sum(min(size, _MOST_WEIGHTS) for size in sizes)
        share = _SHARE_FOR_TRIALS * sum(sizes)
        makes_up = trials <= share * _READING * num_left
        least = trials * (1 if makes_up else 2)
        if tokens < self._try_from or share * tokens < least:
            return False
        if share * tokens < _PATIENCE * least and is_busy():
            self._try_from = 2 * tokens
            return False
        return True

    @torch.no_grad()
    def _try_all(self) -> None:
        """Makes the trials that are missing; ends the matter if no way is faster."""
        news = []
        for kind, modules in self._kinds.items():
            if kind not in self.trials:
                start = perf_counter()
                found, is_general = _trial(kind, [module.weight for module in modules])
                self.trials[kind] = found
                if is_general:
                    news.append((_key(kind), found._asdict()))
                _log.info("tried %s in %.2f s: %s", kind, perf_counter() - start, found.way)
        if news and not is_busy():
            keep_measured(news)
        if not self._is_in_place() and not any(self.trials[kind].way for kind in self._kinds):
            self.reason = self.reason or "no layer is at least 10 % faster packed"
            self.is_settled = True

    def _saved(self) -> float:
        """The seconds that packed layers would have saved so far, the work at hand included."""
        return sum(
            len(modules) * num * self.trials[kind].saved(width)
            for kind, modules in self._kinds.items()
            for width, num in self._forwards.items()
        )

    def _price(self) -> float:
        """The seconds that packing takes."""
        return sum(len(m) * self.trials[kind].packing for kind, m in self._missing().items())

    def _missing(self) -> dict[Kind, list[nn.Linear]]:
        """The layers that would be faster packed and are not."""
        missing = {}
        for kind, modules in self._kinds.items():
            found = self.trials.get(kind)
            if found is None or found.way is None:
                continue
            beside = self._how is None or self._how.copies
            without = [
                module
                for module in modules
                if not is_packed_in_place(module)
                and self._in_use[module].held is None
                and (beside or self._goes_in_place(module, found))
            ]
            if without:
                missing[kind] = without
        return missing

    def _is_in_place(self) -> bool:
        return self._how is not None and bool(self._how.layers)

    def _goes_in_place(self, module: nn.Linear, found: Trial) -> bool:
        return module in self._alone and found.suits_in_place

    @torch.no_grad()
    def _pack_all(self, *, whatever_memory: bool) -> None:
        """Packs what is missing, some layers at a time, so that what is interrupted stays right."""
        self.is_settled = True
        missing = self._missing()
        in_place = {
            kind: [m for m in modules if self._goes_in_place(m, self.trials[kind])]
            for kind, modules in missing.items()
        }
        more = _num_bytes(missing) - _num_bytes(in_place)
        if not whatever_memory and more > _SHARE_OF_FREE * free_memory():
            amount = f"{more / 1e6:.0f} MB"
            self.reason = f"packed weights would take {amount}, too much of what is free"
            missing = in_place
        num_bytes = _num_bytes(missing)
        if not num_bytes:
            return
        start, price = perf_counter(), self._price()
        _log.info("packing %.0f MB of weights, which takes about %.1f s", num_bytes / 1e6, price)
        options = {"unit": "B", "unit_scale": True, "disable": price < _SHOWN}
        with hf_logging.tqdm(total=num_bytes, desc="Packing weights", **options) as bar:
            for kind, modules in missing.items():
                for some in _in_parts(modules, _AT_ONCE // kind.num_weights):
                    self._fill(kind, some)
                    bar.update(kind.num_bytes * len(some))
        _log.info("packed %.0f MB of weights in %.2f s", num_bytes / 1e6, perf_counter() - start)

    def _drop_changed(self) -> None:
        """Drops copies that are not of a layer's weight as it is, and packs what can be packed."""
        packable = {module for modules in self._kinds.values() for module in modules}
        changed = set()
        for module, slot in self._in_use.items():
            if slot.held is not None and (
                module not in packable or slot.held.origin != Origin.of(module.weight)
            ):
                slot.held = None
                changed.add(module)
        for kind, modules in self._missing().items():
            if some := [module for module in modules if module in changed]:
                self._fill(kind, some)

    def _fill(self, kind: Kind, modules: Sequence[nn.Linear]) -> None:
        found = self.trials[kind]
        weights = [module.weight for module in modules]
        origins = [Origin.of(weight) for weight in weights]  # What is written now is seen later.
        with torch.inference_mode(False):
            copies = pack_all(str(found.way), weights)
        for module, origin, copy in zip(modules, origins, copies, strict=True):
            if self._goes_in_place(module, found):
                # What does not come back bit by bit stays as it is.
                assert self._how is not None
                if copy is not None and torch.equal(copy.unpacked(), module.weight):
                    module.weight = PackedWeight.of(module.weight, copy, kept=self._how.kept)
                    self._how.layers.add(module)
                    continue
                copy = None
            held = Held(origin, copy, found.least_tokens, found.most_tokens)
            self._in_use[module].held = held


def _kinds_of(modules: Sequence[nn.Linear]) -> dict[Kind, list[nn.Linear]]:
    """Those of the layers that can be packed, by kind."""
    kinds: dict[Kind, list[nn.Linear]] = {}
    for module in modules:
        weight = getattr(module, "weight", None)
        if type(weight) is nn.Parameter and _can_be_packed(weight):
            kind = Kind(weight.shape[0], weight.shape[1], weight.dtype)
            kinds.setdefault(kind, []).append(module)
    return kinds


def _can_be_packed(weight: torch.Tensor) -> bool:
    return (
        weight.is_contiguous()
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and bool(ways_for(weight.dtype))
    )


def _alone(model: Any, how: InPlace) -> set[nn.Linear]:
    """The layers that may be packed in place: no other layer has their weight.

    The output head keeps a weight that could not be given back.
    """
    if how.is_over:
        return set()
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings() if how.kept else None
    return {m for m in linears_of(model) if m is not head and owners[id(m.weight)] == 1}


def _num_bytes(layers: Mapping[Kind, Sequence[nn.Linear]]) -> int:
    return sum(kind.num_bytes * len(modules) for kind, modules in layers.items())


def _in_parts(modules: Sequence[nn.Linear], size: int) -> Iterator[Sequence[nn.Linear]]:
    for first in range(0, len(modules), max(size, 1)):
        yield modules[first : first + max(size, 1)]


def _known_trial(kind: Kind) -> Trial | None:
    """What an earlier trial on this machine has found; None if there was none."""
    values = find_measured(_key(kind))
    try:
        own, packed = ({int(w): float(s) for w, s in values[name].items()} for name in _TIMES)
        found = Trial(own, values["way"], packed, float(values["packing"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    is_sound = found.way in ways_for(kind.dtype) and set(packed) == set(WIDTHS)
    return found if set(own) == set(WIDTHS) and (found.way is None or is_sound) else None


def _trial(kind: Kind, weights: Sequence[torch.Tensor]) -> tuple[Trial, bool]:
    """Times layers of one kind in all ways, in turns. Draws no randomness.

    Says too whether other weights of this kind would do no better.
    """
    weights, scale = _sample(kind, weights)
    layers: dict[str, Sequence[_Product]]
    layers = {_OWN: [partial(own_linear, weight=weight, bias=None) for weight in weights]}
    packing: dict[str, float] = {}
    for way in ways_for(kind.dtype):
        start = perf_counter()
        with suppress(RuntimeError):
            copies = [copy for copy in pack_all(way, weights) if copy]
            if len(copies) == len(weights):
                packing[way] = scale * (perf_counter() - start)
                layers[way] = [partial(copy, bias=None) for copy in copies]
    times = _in_turns(layers, weights[0], scale)
    shares = {
        way: mean(min(times[way][w] / times[_OWN][w], 1.0) for w in _DECIDE) for way in packing
    }
    best = min(packing, key=shares.__getitem__, default=None)
    if best is None or shares[best] > _PAYS:
        found = Trial(times[_OWN], None, {}, 0.0)
    else:
        found = Trial(times[_OWN], best, times[best], packing[best])
    return found, list(packing) == ways_for(kind.dtype)


def _in_turns(
    layers: Mapping[str, Sequence[_Product]], weight: torch.Tensor, scale: float
) -> dict[str, dict[int, float]]:
    """The least seconds of one layer, for each way and number of tokens."""
    times: dict[str, dict[int, float]] = {name: {} for name in layers}
    generator = torch.Generator("cpu").manual_seed(0)
    for num_tokens in WIDTHS:
        shape = (num_tokens, weight.shape[1])
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(weight)
        for _ in range(_ROUNDS):
            for name, products in layers.items():
                taken = scale * _seconds(products, x)
                times[name][num_tokens] = min(taken, times[name].get(num_tokens, taken))
    return times


def _sample(kind: Kind, weights: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], float]:
    """Some layers or a part of a large one, and what makes one layer's time of all of theirs."""
    if kind.num_weights <= _MOST_WEIGHTS:
        some = weights[: _MOST_WEIGHTS // kind.num_weights]
        return some, 1 / len(some)
    num_rows = max(_MOST_WEIGHTS // kind.num_in, 1)
    return [weights[0][:num_rows]], kind.num_out / num_rows


def _seconds(products: Sequence[_Product], x: torch.Tensor) -> float:
    """The time of all layers in a row."""
    start = perf_counter()
    for product in products:
        product(x)
    return perf_counter() - start


_OWN = "own"  # stands for the products as torch computes them, beside the ways to pack
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

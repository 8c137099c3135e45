"""The packed weights of one model: when they are made, and whether they are up to date.

A layer is packed only if a short trial shows that this cuts its time by at least 10 %, and only
when that would have paid by now. All users of a model share one set of copies, which is freed with
the last of them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers.utils import logging as hf_logging

from selfspec.machine.memory import free_memory
from selfspec.run.packed.account import Products, Work
from selfspec.run.packed.layers import (
    Held,
    Origin,
    Slot,
    StandIns,
    kinds_of,
    linears_of,
    put_in_place,
)
from selfspec.run.packed.linears import Way, pack_all, ways_for
from selfspec.run.packed.trials import (
    WIDTHS,
    Kind,
    Trial,
    glance,
    known_trial,
    price_of,
    trial,
)

__all__ = ["PackedWeights", "Packing"]

_log = logging.getLogger("selfspec")

_SHARE_OF_FREE = 0.25  # Unless the user asks for them, copies take at most this share.
_SHARE_FOR_TRIALS = 0.1  # Trials take at most this share of the time that products took so far.
_SHOWN = 2.0  # What takes longer than this many seconds is shown.
_NEARLY = 1.25  # In place, one token may take this much longer than with the weight as it was.
_AT_ONCE = 1 << 25  # About this many weights are packed between two looks at the clock.


class PackedWeights:
    """The copies of a model's weights. Safe to use from several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slots: WeakKeyDictionary[nn.Linear, Slot] = WeakKeyDictionary()
        self.trials: dict[Kind, Trial] = {}
        self.work = Work()
        self.stand_ins = StandIns()

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
        """How many bytes the copies take."""
        held = [slot.held for slot in list(self.slots.values())]
        return sum(each.copy.num_bytes for each in held if each and each.copy)


_lock = threading.Lock()
_shared: WeakKeyDictionary[nn.Module, ref[PackedWeights]] = WeakKeyDictionary()


class Packing:
    """One call's use of a model's copies, with the model's layers as they are now.

    Making one drops the copies of weights that have changed, and packs the layers anew that can
    still be packed. Weights can change between two calls without a trace in torch, for example when
    adapters are merged. So packed weights are summed up, which takes a part of a plain step's time.

    With `in_place`, copies take the place of the weights of layers for good, and none is made that
    takes more memory. Inside of that context no other thread may run these layers.
    """

    def __init__(
        self,
        weights: PackedWeights,
        model: Any,
        *,
        max_nodes: int = 1,
        in_place: AbstractContextManager[object] | None = None,
    ) -> None:
        self._weights = weights
        self._head = _head_of(model)
        linears = linears_of(model)
        within = [module for module in linears if module is not self._head]
        self._kinds = kinds_of(_alone(within, model) if in_place else linears)
        self._in_place = in_place
        self._max_nodes = max_nodes
        self._own: Products | None = None  # as torch computes them, seen at a glance
        self.reason = None if self._kinds else "it has no plain linear layers that torch can pack"
        with weights.lock, torch.no_grad():
            for kind in self._kinds.keys() - weights.trials.keys():
                if (known := known_trial(kind)) is not None:  # By an earlier process.
                    weights.trials[kind] = known
            self._slots = {module: weights.slots.setdefault(module, Slot()) for module in linears}
            self._renew()
            self._is_settled = self._knows_all() and not self._missing()

    @property
    def num_bytes(self) -> int:
        """How many bytes the model's copies take."""
        return self._weights.num_bytes

    @property
    def is_packed(self) -> bool:
        """Whether all layers that get faster are packed, and some do."""
        return self._knows_all() and not self._missing() and self.num_bytes > 0

    def in_use(self) -> AbstractContextManager[None]:
        """Inside, in this thread alone, layers compute from their copies once they have them."""
        return self._weights.stand_ins.put(self._slots)

    def before_prompt(self, num_tokens: int, num_rows: int) -> None:
        """Counts a forward over prompts with this many tokens; packs before it if that pays."""
        if not self._is_settled:
            with self._weights.lock:
                self._weights.work.prompts[num_rows] += num_tokens
                self._pack_if_due()

    def before_step(self, num_rows: int) -> bool:
        """Counts a step; says whether layers were packed since the call's last forward."""
        if self._is_settled:
            return False
        with self._weights.lock:
            self._weights.work.steps[num_rows, self._max_nodes] += 1
            self._pack_if_due()
        return self._is_settled and self.reason is None

    def pack(self, *, whatever_memory: bool = False) -> str | None:
        """Packs all layers that get faster now; returns why none is, or None."""
        with self._weights.lock:
            self._try_all()
            self._pack_all(whatever_memory=whatever_memory)
        return self.reason

    def _pack_if_due(self) -> None:
        if self._knows_all() or self._may_try():
            self._try_all()
            if self._saved() >= self._price():
                self._pack_all(whatever_memory=False)

    def _knows_all(self) -> bool:
        return all(kind in self._weights.trials for kind in self._kinds)

    def _may_try(self) -> bool:
        """Did products take so long by now that the time of trials is a small part of it?"""
        if self._own is None:
            self._own = self._products({k: glance(m[0].weight) for k, m in self._kinds.items()})
        price = sum(price_of(kind, len(modules)) for kind, modules in self._kinds.items())
        return price <= _SHARE_FOR_TRIALS * self._weights.work.seconds(self._own)

    @torch.no_grad()
    def _try_all(self) -> None:
        """Makes the trials that are missing; ends the matter if no way is faster."""
        trials = self._weights.trials
        for kind, modules in self._kinds.items():
            if kind not in trials:
                start = perf_counter()
                trials[kind] = trial(kind, [module.weight for module in modules])
                _log.info("tried %s in %.2f s: %s", kind, perf_counter() - start, trials[kind].way)
        if self.reason is None and not any(self._way_of(kind) for kind in self._kinds):
            self.reason, self._is_settled = "no layer is at least 10 % faster packed", True

    def _saved(self) -> float:
        """The seconds that packed layers would have saved so far, the work at hand included."""
        trials, work = self._weights.trials, self._weights.work
        own = self._products({kind: trials[kind].own for kind in self._kinds})
        packed = self._products({kind: trials[kind].best() for kind in self._kinds})
        return work.seconds(own) - work.seconds(packed)

    def _price(self) -> float:
        """The seconds that packing takes."""
        trials = self._weights.trials
        return sum(trials[kind].packing * len(modules) for kind, _, modules in self._missing())

    def _missing(self) -> list[tuple[Kind, Way, list[nn.Linear]]]:
        """The layers that would be faster packed and are not."""
        lacking = []
        for kind, modules in self._kinds.items():
            way = self._way_of(kind)
            without = [module for module in modules if self._slots[module].held is None]
            if way is not None and without:
                lacking.append((kind, way, without))
        return lacking

    def _way_of(self, kind: Kind) -> Way | None:
        """The way that is faster, if one is known; in place, about as fast for one token too."""
        found = self._weights.trials.get(kind)
        ways = ways_for(kind.dtype) if found else ()
        way = next((way for way in ways if found and way.name == found.way), None)
        if not way or not found or self._in_place is None:
            return way
        takes_more = way.bytes_per_weight > kind.dtype.itemsize
        return None if takes_more or found.packed[1] > _NEARLY * found.own[1] else way

    @torch.no_grad()
    def _pack_all(self, *, whatever_memory: bool) -> None:
        """Packs what is missing, some layers at a time, so that what is interrupted stays right."""
        self._is_settled = True
        missing = self._missing()
        num_bytes = sum(
            way.bytes_per_weight * kind.num_weights * len(modules) for kind, way, modules in missing
        )
        if not num_bytes:
            return
        is_limited = not whatever_memory and self._in_place is None
        if is_limited and num_bytes > _SHARE_OF_FREE * free_memory():
            self.reason = (
                f"packed weights would take {num_bytes / 1e6:.0f} MB, too much of what is free"
            )
            return
        start, price = perf_counter(), self._price()
        _log.info("packing %.0f MB of weights, which takes about %.1f s", num_bytes / 1e6, price)
        options = {"unit": "B", "unit_scale": True, "disable": price < _SHOWN}
        with hf_logging.tqdm(total=num_bytes, desc="Packing weights", **options) as bar:
            for kind, way, modules in missing:
                for some in _in_parts(modules, _AT_ONCE // kind.num_weights):
                    self._fill(kind, way, some)
                    bar.update(way.bytes_per_weight * kind.num_weights * len(some))
        _log.info("packed %.0f MB of weights in %.2f s", num_bytes / 1e6, perf_counter() - start)

    def _renew(self) -> None:
        """Drops copies that are not of a layer's weight as it is, and packs what can be packed."""
        packable = {module for modules in self._kinds.values() for module in modules}
        changed = set()
        for module, slot in self._slots.items():
            if slot.held is not None and (
                module not in packable or slot.held.origin != Origin.of(module.weight)
            ):
                slot.held = None
                changed.add(module)
        for kind, way, modules in self._missing():
            if some := [module for module in modules if module in changed]:
                self._fill(kind, way, some)

    def _fill(self, kind: Kind, way: Way, modules: Sequence[nn.Linear]) -> None:
        found = self._weights.trials[kind]
        weights = [module.weight for module in modules]
        origins = [Origin.of(weight) for weight in weights]  # What is written now is seen later.
        copies = pack_all(way, weights)
        limits = (found.least_tokens, found.most_tokens)
        for module, origin, copy in zip(modules, origins, copies, strict=True):
            self._slots[module].held = Held(origin, copy, *limits)
        if self._in_place is not None:
            with self._in_place:
                for module, copy in zip(modules, copies, strict=True):
                    if copy is not None:
                        put_in_place(module, copy)

    def _products(self, times: Mapping[Kind, Mapping[int, float]]) -> Products:
        """The seconds of all layers together, the output head apart."""
        layers, head = dict.fromkeys(WIDTHS, 0.0), dict.fromkeys(WIDTHS, 0.0)
        for kind, modules in self._kinds.items():
            heads = sum(module is self._head for module in modules)
            for width in WIDTHS:
                layers[width] += (len(modules) - heads) * times[kind][width]
                head[width] += heads * times[kind][width]
        return Products(layers, head)


def _head_of(model: Any) -> Any:
    """The layer that gives logits; None where a model names none."""
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _alone(linears: Sequence[nn.Linear], model: nn.Module) -> list[nn.Linear]:
    """The layers whose weight no other layer shares."""
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return [module for module in linears if owners[id(module.weight)] == 1]


def _in_parts(modules: Sequence[nn.Linear], size: int) -> Iterator[Sequence[nn.Linear]]:
    for first in range(0, len(modules), max(size, 1)):
        yield modules[first : first + max(size, 1)]

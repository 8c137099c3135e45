"""How a call's forwards are run, and what is kept of it for the next call.

One model's graphs serve one call at a time. They are made anew where the model has changed since,
and tried before first use: what a model does that no capture can follow, shows there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from selfspec.device import device_for
from selfspec.packed import Copy, Group, packed_bytes, settles
from selfspec.packs import Packs
from selfspec.plugin.abilities import try_backend
from selfspec.plugin.backends import AttentionTypes
from selfspec.plugin.captures import capture_reason, capture_state
from selfspec.plugin.graphs import GraphBackend
from selfspec.plugin.heads import Rounding
from selfspec.plugin.runner import StaticRunner
from selfspec.plugin.turns import Turns
from selfspec.products import (
    NATIVE,
    PACKED,
    TURNED,
    WIDENED,
    Products,
    Table,
    products_of,
    turning,
)

__all__ = ["Forwards", "Lent"]

_WIDEST_TRIED = 8


@dataclass(frozen=True)
class Lent:
    """How one call runs its forwards: by a runner, else op by op, some products by other ways.

    `copies` are the weights that are packed, by who uses them. `rounding` is the nearest to what
    was asked for that can be had. `reason` says why it is not run as it was asked for, where it
    was; `seconds` is what finding out took.
    """

    runner: StaticRunner | None = None
    reason: str | None = None
    table: Table | None = None
    copies: Mapping[Group, Copy] = field(default_factory=dict)
    rounding: Rounding = "free"
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """How forwards without the runner are run: by the best of the ways that are in use."""
        if self.copies:
            return PACKED
        if not self.table:
            return "eager"
        return NATIVE if any(NATIVE in names for names in self.table.values()) else TURNED

    @property
    def packed_bytes(self) -> int:
        """What the copies take, or a little more."""
        return sum(map(packed_bytes, self.copies))

    def products(self, model: Any) -> AbstractContextManager[None]:
        """The model with its products' best ways."""
        if not self.table:
            return nullcontext()
        return turning(model, self.table, self.copies, settled=self.rounding == "stock")

    @contextmanager
    def decoding(self, model: Any) -> Iterator[None]:
        """The same with stock's own switches for decoding."""
        with decode_mode(model), self.products(model):
            yield


class Forwards:
    """What one `SelfSpec` keeps for each model. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
        self._turns = Turns()
        self._packs: WeakKeyDictionary[Any, Packs] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def lend(
        self, model: Any, attention: AttentionTypes | None, forward: str, *, rounding: str
    ) -> Iterator[Lent]:
        """How one call is to run the model; what that takes is made or measured on first use.

        `forward` is one of `FORWARDS`, `rounding` of `ROUNDINGS`, `attention` None where the model
        is given chains.
        """
        device = device_for(model.device, overlap=False)
        held = _rounding(model, rounding)
        if forward in (TURNED, PACKED) or (forward == "auto" and not device.can_capture):
            yield self._by_best_ways(model, forward, held)
        elif forward == "eager":
            yield Lent(rounding=held)
        elif attention is None:
            reason = "a chain grows the stock KV cache, which has no fixed places"
            yield Lent(rounding=held, reason=reason)
        elif forward != "compiled" and not device.can_capture:
            yield Lent(rounding=held, reason=f"a {device.name} captures no graphs")
        else:
            with self._of(model).borrow(model, attention, forward == "compiled") as found:
                if isinstance(found, str):
                    yield Lent(rounding=held, reason=found)
                else:
                    yield Lent(found)

    def _by_best_ways(self, model: Any, forward: str, held: Rounding) -> Lent:
        start = perf_counter()
        found = products_of(model)
        without = (TURNED, WIDENED, NATIVE)  # copies
        allowed = without if forward == TURNED else (*without, PACKED)
        table = self._turns.table(found, allowed, settled=held == "stock")
        packs, groups = self._packs_of(model), _packed_groups(found, table)
        if forward == "auto" and not packs.fit(groups):
            table, groups = self._turns.table(found, without, settled=held == "stock"), []
        copies = packs.copies(groups)
        is_as_asked = forward == "auto" or (copies if forward == PACKED else table)
        return Lent(
            table=table,
            copies=copies,
            rounding=held,
            reason=None if is_as_asked else f"none of its products is faster {forward} here",
            seconds=perf_counter() - start,
        )

    def _packs_of(self, model: Any) -> Packs:
        with self._lock:
            return self._packs.setdefault(model, Packs.of(model))

    def _of(self, model: Any) -> _Kept:
        with self._lock:
            return self._kept.setdefault(model, _Kept())


class _Kept:
    """One model's runner, or why it has none, for the state that the model was last found in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._found: StaticRunner | str = ""

    @contextmanager
    def borrow(
        self, model: Any, attention: AttentionTypes, compiled: bool
    ) -> Iterator[StaticRunner | str]:
        if not self._lock.acquire(blocking=False):
            yield "another call is using this model's fixed KV slots"
            return
        try:
            yield capture_reason(model, attention) or self._fresh(model, attention, compiled)
        finally:
            self._lock.release()

    def _fresh(self, model: Any, attention: AttentionTypes, compiled: bool) -> StaticRunner | str:
        """What was found before, or else what is found now."""
        state = (compiled, capture_state(model))
        if state != self._state:
            self._state, self._found = None, ""  # frees the old runner before there is a new one
            self._found = _tried(model, attention, compiled)
            self._state = state
        if isinstance(self._found, StaticRunner) and self._found.kind == "eager":
            self._found = str(self._found.reason)  # it failed on the way: eager forwards are better
        return self._found


def _rounding(model: Any, asked: str) -> Rounding:
    """The nearest to it that can be had: stock's where that computes each token by itself."""
    has_sdpa = getattr(model.config, "_attn_implementation", None) == "sdpa"
    if asked == "stock" and model.device.type == "cpu" and has_sdpa and settles(model.dtype):
        return "stock"
    return "free"


def _packed_groups(found: Products, table: Table) -> list[Group]:
    """Those for which the table would have their weights packed."""
    return [
        group
        for product, groups in found.items()
        for group in groups
        if PACKED in table.get(product, ())
    ]


def decode_mode(model: Any) -> AbstractContextManager[None]:
    """Stock's own switches for the time of decoding, where this version has them."""
    enter: Callable[[], AbstractContextManager[None]]
    enter = getattr(model, "_optimize_model_for_decode", nullcontext)
    return enter()


def _tried(model: Any, attention: AttentionTypes, compiled: bool) -> StaticRunner | str:
    """A runner whose forwards come out right; or why there is none."""
    device = device_for(model.device, overlap=False)
    runner = StaticRunner(attention, device, model.device, compiled=compiled)

    def new_backend(model: Any, *args: Any, **kwargs: Any) -> GraphBackend:
        return GraphBackend(model, runner, *args, **kwargs, widest=_WIDEST_TRIED)

    try:
        with decode_mode(model):
            reason = try_backend(model, attention, new_backend)
    except torch.OutOfMemoryError:
        reason = "there is no memory to try it"
    return runner.reason or reason or runner

"""How a call's forwards are computed: the one door to a faster forward.

`Forwards.prepare` says for one call what runs its forwards, what memory that holds, and why if
something could not be had. Captured graphs, packed and streamed weights stand behind it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from selfspec.config import SpecConfig
from selfspec.cost import CostCurve, Ledger, Pacing
from selfspec.errors import UnsupportedError
from selfspec.machine.device import device_for
from selfspec.run.backend import Backend
from selfspec.run.backends import ChainBackend, TreeBackend
from selfspec.run.costs import Costs, measure
from selfspec.run.graphs.backend import GraphBackend
from selfspec.run.graphs.kept import KeptRunner
from selfspec.run.graphs.runner import StaticRunner
from selfspec.run.model import decode_mode, device_of
from selfspec.run.packed import PackedWeights, Packing
from selfspec.run.probe import Ability, probe
from selfspec.run.rows_backend import RowsBackend
from selfspec.run.streamed import is_streamed, no_forward
from selfspec.run.two_parts import TwoParts

__all__ = ["Forwards", "Prepared", "Prompt", "may_pack", "profile"]

_log = logging.getLogger("selfspec")

# A backend starts with so many KV slots behind the prompt, if the text may become that long. Fixed
# slots start with more, since adding some voids what was captured.
_MIN_ROOM = 256
_MIN_STATIC_ROOM = 4096
# Attention in two parts is tried once this many tokens were decoded with the model.
_TOKENS_THAT_PAY = 512


class Prompt(NamedTuple):
    """What a backend needs to know of a prompt that was read."""

    cache: Any
    input_ids: torch.Tensor  # (B, P)
    visible: torch.Tensor | None  # (B, P) bool: which columns count; None if all do
    model_kwargs: dict[str, Any]  # those of the first step
    reach: int  # how far behind the prompt the last token may be, drafted or not
    width: int  # the most queries of a row in one forward

    def room(self, least: int) -> int:
        """KV slots to start with behind the prompt: all that may come, or the prompt's length."""
        return min(self.reach, max(self.input_ids.shape[1], least)) + self.width


@dataclass
class Prepared:
    """How one call runs its forwards.

    `ledger` knows what drafts have gained and lost with the model so far. `runner` replays captured
    forwards, `packing` packs weights when that pays; without both the model is run as it is.
    `is_streamed` says that it reads weights meanwhile. `two_parts` tries whether attention in two
    parts is faster. `reason` says why the model is not run as it was asked for.
    """

    model: Any
    ability: Ability
    config: SpecConfig
    costs: Costs
    ledger: Ledger
    runner: StaticRunner | None = None
    packing: Packing | None = None
    is_streamed: bool = False
    two_parts: TwoParts | None = None
    reason: str | None = None

    @property
    def kind(self) -> str:
        """How forwards are run that are not captured, as `GenerationStats.forward` names it."""
        if self.is_streamed:
            return "streamed"
        return "packed" if self.packing is not None and self.packing.is_packed else "eager"

    @property
    def packed_bytes(self) -> int:
        """What second copies of weights take; a streamed model's take the place of weights."""
        return self.packing.num_bytes if self.packing and not self.is_streamed else 0

    def before_prompt(self, num_tokens: int, num_rows: int) -> None:
        """Packs weights before a prompt is read, if that pays by now."""
        if self.packing is not None:
            self.packing.before_prompt(num_tokens, num_rows)

    def before_step(self, num_rows: int) -> bool:
        """Packs weights between two steps, if that pays by now; then `kind` has changed."""
        return self.packing is not None and self.packing.before_step(num_rows)

    def reading(self) -> AbstractContextManager[None]:
        """The model as it is run over the prompt."""
        return self.packing.in_use() if self.packing else nullcontext()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """The same with stock's own switches for decoding."""
        with decode_mode(self.model), self.reading():
            yield

    def backend(self, prompt: Prompt) -> Backend:
        """What runs the forwards behind a prompt that was read."""
        if self.ability.mode == "chain":
            ids, kwargs = prompt.input_ids, prompt.model_kwargs
            return ChainBackend(self.model, prompt.cache, ids, kwargs, kind=self.kind)
        if self.runner is not None:
            try:
                return self._graph_backend(self.runner, prompt)
            except torch.OutOfMemoryError:
                self.reason = "there is no memory for fixed KV slots beside the prompt's"
                _refuse_if_strict(self.config, self.reason)
        room = prompt.room(_MIN_ROOM)
        arguments = self._arguments(prompt)
        ways: Any = {"kind": self.kind, "two_parts": self.two_parts}
        return TreeBackend(self.model, *arguments, room=room, reach=prompt.reach, **ways)

    def rows_backend(self, max_rows: int, max_bytes: int | None) -> RowsBackend:
        """What runs the forwards of rows that come and go, never as captured graphs."""
        assert self.ability.attention is not None
        return RowsBackend(
            self.model, self.ability.attention, max_rows=max_rows, max_bytes=max_bytes
        )

    def curve(self, backend: Backend, num_rows: int) -> CostCurve:
        """What a step of each width costs, as far as it is known or expected; runs nothing."""
        tried = self.packing.costs(num_rows) if self.packing else None
        return self.costs.curve(self.model, backend, num_rows, tried)

    def _graph_backend(self, runner: StaticRunner, prompt: Prompt) -> GraphBackend:
        return GraphBackend(
            self.model,
            runner,
            *self._arguments(prompt),
            room=prompt.room(_MIN_STATIC_ROOM),
            widest=prompt.width,
            reach=prompt.reach,
            strict=self.config.strict and self.config.forward != "auto",
        )

    def _arguments(self, prompt: Prompt) -> tuple[Any, ...]:
        assert self.ability.attention is not None
        positions = prompt.model_kwargs["position_ids"][..., -1:]
        positions = positions.expand(*positions.shape[:-2], len(prompt.input_ids), 1)
        device, visible = device_of(self.model), prompt.visible
        visible = None if visible is None else visible.to(device)
        return prompt.cache, self.ability.attention, positions.to(device), visible


class Forwards:
    """What one `SelfSpec` knows of running each model. Safe to use from several threads."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._two_parts = TwoParts()
        self._abilities: WeakKeyDictionary[Any, dict[Any, Ability]] = WeakKeyDictionary()
        self._runners: WeakKeyDictionary[Any, KeptRunner] = WeakKeyDictionary()
        self._packed: WeakKeyDictionary[Any, PackedWeights] = WeakKeyDictionary()
        self._num_tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._pacings: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Pacing]] = WeakKeyDictionary()
        self._ledgers: WeakKeyDictionary[Any, Ledger] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._probing = threading.Lock()

    def ability(self, model: Any) -> Ability:
        """What a model can verify as it stands now; tried on first use."""
        implementation = getattr(model.config, "_attn_implementation", None)
        state = (implementation, model.dtype, device_of(model), model.training)
        with self._probing:  # A second thread waits for the first one's verdict.
            known = self._abilities.setdefault(model, {})
            if state not in known:
                start = perf_counter()
                known[state] = probe(model)
                seconds, mode = perf_counter() - start, known[state].mode
                name = type(model).__name__
                _log.info("%s can verify: %s (tried in %.2f s)", name, mode, seconds)
            return known[state]

    @contextmanager
    def prepare(self, model: Any, config: SpecConfig) -> Iterator[Prepared]:
        """How one call is to run the model; what that takes is made here, when it is due."""
        with self._lock:
            ledger = self._ledgers.setdefault(model, Ledger())
        prepared = Prepared(model, self.ability(model), config, self.costs, ledger)
        forward, device = config.forward, device_for(device_of(model), overlap=False)
        is_due = may_pack(config) and self._has_paid(model)
        prepared.two_parts = self._two_parts if is_due else None
        if is_streamed(model):
            self._stream(prepared)
            yield prepared
            return
        if forward == "graph" or (forward == "auto" and device.can_capture):
            with self._captured(prepared):
                yield prepared
            return
        self._pack(prepared)
        yield prepared

    def knows_pair(self, model: Any, draft_model: Any) -> bool:
        """Was the pacing of these two models asked for before?"""
        with self._lock:
            return draft_model in self._pacings.get(model, ())

    def pacing(self, model: Any, draft_model: Any) -> Pacing:
        """What a draft model costs and brings beside a model."""
        with self._lock:
            known = self._pacings.setdefault(model, WeakKeyDictionary())
            return known.setdefault(draft_model, Pacing())

    def count(self, model: Any, num_tokens: int) -> None:
        """Takes in that so many tokens were decoded with a model."""
        with self._lock:
            self._num_tokens[model] = self._num_tokens.get(model, 0) + num_tokens

    @contextmanager
    def _captured(self, prepared: Prepared) -> Iterator[None]:
        model, attention = prepared.model, prepared.ability.attention
        device = device_for(device_of(model), overlap=False)
        if attention is None:
            prepared.reason = "a chain grows the stock KV cache, which has no fixed slots"
        elif not device.can_capture:
            prepared.reason = f"a {device.name} captures no graphs"
        if prepared.reason is not None:
            _refuse_if_strict(prepared.config, prepared.reason)
            yield
            return
        assert attention is not None
        with self._runner_of(model).borrow(model, attention) as found:
            if isinstance(found, str):
                prepared.reason = found
                _refuse_if_strict(prepared.config, found)
            else:
                prepared.runner = found
            yield

    def _stream(self, prepared: Prepared) -> None:
        """Weights that are in memory are packed in place, since the files have them too."""
        prepared.is_streamed = True
        self._pack(prepared, in_place=no_forward(prepared.model))
        if prepared.config.forward not in ("auto", "eager"):
            prepared.reason = "its weights are streamed, and only plain operations wait for them"
            _refuse_if_strict(prepared.config, prepared.reason)

    def _pack(
        self, prepared: Prepared, in_place: AbstractContextManager[object] | None = None
    ) -> None:
        """Packs weights at once if that is asked for; else the forwards to come decide when."""
        model, config = prepared.model, prepared.config
        at_once = config.forward == "packed" and in_place is None
        if not at_once and not may_pack(config):
            return
        prepared.packing = self.packing(model, config.max_nodes, in_place)
        if at_once:
            prepared.reason = prepared.packing.pack(whatever_memory=True)
            if prepared.reason is not None:
                _refuse_if_strict(config, prepared.reason)

    def packing(
        self,
        model: Any,
        max_nodes: int,
        in_place: AbstractContextManager[object] | None = None,
    ) -> Packing:
        """One call's use of the copies of a model's weights."""
        with self._lock:
            weights = self._packed.setdefault(model, PackedWeights.of(model))
        return Packing(weights, model, max_nodes=max_nodes, in_place=in_place)

    def _has_paid(self, model: Any) -> bool:
        with self._lock:
            return self._num_tokens.get(model, 0) >= _TOKENS_THAT_PAY

    def _runner_of(self, model: Any) -> KeptRunner:
        with self._lock:
            return self._runners.setdefault(model, KeptRunner())


def profile(
    model: Any, config: SpecConfig, *, num_columns: int, num_rows: int, max_seconds: float = 30.0
) -> tuple[dict[str, str | int], CostCurve]:
    """Measures what forwards cost behind a text of `num_columns` tokens, run as a call runs them.

    Returns what the curve depends on, with the curve, which the next call that is run in the same
    way starts from. Where packed weights pay, that is one that comes after they are packed. Refuses
    a model that can't verify a tree, or can't be run as the config asks.
    """
    forwards = Forwards()
    ability = forwards.ability(model)
    if ability.attention is None:
        raise UnsupportedError(f"a profile needs a model that can verify trees: {ability.reason}")
    forwards.count(model, _TOKENS_THAT_PAY)
    strict = config.changed(strict=True)
    with torch.no_grad(), forwards.prepare(model, strict) as prepared, prepared.decoding():
        if prepared.packing is not None:
            prepared.packing.pack()

        def new_backend(cache: Any, positions: torch.Tensor, room: int) -> Backend:
            ids = torch.zeros(num_rows, num_columns, dtype=torch.long)
            kwargs = {"position_ids": positions}
            return prepared.backend(Prompt(cache, ids, None, kwargs, room, room))

        return measure(
            model, new_backend, num_columns=num_columns, num_rows=num_rows, max_seconds=max_seconds
        )


def may_pack(config: SpecConfig) -> bool:
    """Whether weights may be packed unasked, by the clock.

    Only a measured budget may depend on clocks: with another one a text must not change once a
    trial finds another way to be faster, and in half precision it could.
    """
    return config.forward == "auto" and config.budget == "measured"


def _refuse_if_strict(config: SpecConfig, reason: str) -> None:
    """Raises where the config insists on a way to run forwards that can't be had."""
    if config.strict and config.forward not in ("auto", "eager"):
        raise UnsupportedError(f"strict=True and forward={config.forward!r} can't be had: {reason}")

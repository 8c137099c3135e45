"""How a call's forwards are computed: the one door to a faster forward.

`Forwards.prepare` says for one call what runs its forwards, what memory that holds, and why if
something could not be had. Captured graphs, packed and streamed weights stand behind it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from selfspec.compat.generation import decoding_switches
from selfspec.config import SpecConfig
from selfspec.cost import Ledger
from selfspec.errors import UnsupportedError
from selfspec.machine.device import Device, device_for
from selfspec.run.backend import Backend
from selfspec.run.backends import ChainBackend, TreeBackend
from selfspec.run.costs import Costs
from selfspec.run.graphs.kept import KeptRunner
from selfspec.run.graphs.runner import StaticRunner
from selfspec.run.model import AttentionTypes, device_of
from selfspec.run.packed import Packing, is_packed_in_place
from selfspec.run.probe import Ability, BrokenTrial, probe
from selfspec.run.prompt import Prompt
from selfspec.run.rows_backend import RowsBackend
from selfspec.run.state import state_of
from selfspec.run.streamed import is_streamed

__all__ = ["Forwards", "Prepared", "may_pack"]

_log = logging.getLogger("selfspec")

# A backend starts with this many KV slots behind the prompt, if the text may become that long.
# Fixed slots start with more, since adding some voids what was captured.
_MIN_ROOM = 256
_MIN_STATIC_ROOM = 4096
_MOST_STATES = 16  # Of one model, whose abilities are kept.
_STEP = 4  # About the tokens of a row in a step, for what packing would save.


@dataclass
class Prepared:
    """How one call runs its forwards.

    `ledger` knows what drafts have gained and lost with the model so far. `runner` replays captured
    forwards, `packing` packs weights when that pays; without both the model is run as it is.
    `is_streamed` says that it reads weights meanwhile. `reason` says why the model is not run as it
    was asked for. It `is_settled` once nothing more is packed.
    """

    model: Any
    ability: Ability
    config: SpecConfig
    costs: Costs
    ledger: Ledger
    runner: StaticRunner | None = None
    packing: Packing | None = None
    is_streamed: bool = False
    is_settled: bool = False
    reason: str | None = None

    @property
    def kind(self) -> str:
        """How forwards are run that are not captured, as `GenerationStats.forward` names it."""
        if self.is_streamed:
            return "streamed"
        if self.packing is not None:
            return "packed" if self.packing.is_packed else "eager"
        return "packed" if any(map(is_packed_in_place, self.model.modules())) else "eager"

    @property
    def may_pack_more(self) -> bool:
        """May weights still be packed in this call?"""
        return self.packing is not None and not self.is_settled

    @property
    def packed_bytes(self) -> int:
        """What copies of weights take beside them."""
        return 0 if self.packing is None else self.packing.num_bytes

    def note_or_refuse(self, reason: str) -> None:
        """Notes why; raises if the config insists on a way that can't be had."""
        self.reason, forward = reason, self.config.forward
        if self.config.strict and forward not in ("auto", "eager"):
            raise UnsupportedError(f"strict=True and {forward=!r} can't be had: {reason}")

    def before_prompt(self, num_tokens: int) -> None:
        """Packs weights before a prompt is read, if that pays by now."""
        if self.packing is not None:
            self.packing.before_forward(num_tokens)

    def before_step(self, num_rows: int, num_left: int) -> bool:
        """Packs weights between two steps if that pays by now; true once no more will be packed.

        The longest row may get `num_left` more tokens.
        """
        assert self.packing is not None
        self.packing.before_forward(_STEP * num_rows, num_left)
        self.is_settled = self.packing.is_settled
        return self.is_settled

    def reading(self) -> AbstractContextManager[None]:
        """The model as it is run over the prompt."""
        return self.packing.in_use() if self.packing else nullcontext()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """The same with stock's own switches for decoding."""
        with decoding_switches(self.model), self.reading():
            yield

    def backend(self, prompt: Prompt, *, reach: int, width: int) -> Backend:
        """What runs the forwards behind a prompt that was read.

        `reach` is how far behind the prompt the last token may be, drafted or not, and `width` the
        most queries of a row in one forward.
        """
        if self.ability.mode == "chain":
            ids, kwargs = prompt.input_ids, prompt.model_kwargs
            return ChainBackend(self.model, prompt.cache, ids, kwargs, kind=self.kind)
        device, attention = device_of(self.model), self.ability.attention
        assert attention is not None
        visible = None if prompt.visible is None else prompt.visible.to(device)
        arguments = (prompt.cache, prompt.next_positions(self.model), visible)
        # All that may come, or as much as the prompt has.
        length = prompt.input_ids.shape[1]
        room, static_room = (
            min(reach, max(length, least)) + width for least in (_MIN_ROOM, _MIN_STATIC_ROOM)
        )
        sizes: Any = {"need": prompt.cache.get_seq_length() + reach + width, "widest": width}
        if self.runner is not None:
            strict = self.config.strict and self.config.forward != "auto"
            captured = TreeBackend(self.model, attention, runner=self.runner, strict=strict)
            try:
                captured.add(*arguments, room=static_room, **sizes)
            except torch.OutOfMemoryError:
                self.note_or_refuse("there is no memory for fixed KV slots beside the prompt's")
            else:
                return captured
        backend = TreeBackend(self.model, attention, kind=self.kind)
        backend.add(*arguments, room=room, **sizes)
        return backend

    def rows_backend(self, max_rows: int, max_bytes: int | None) -> RowsBackend:
        """What runs the forwards of rows that come and go, never as captured graphs."""
        assert self.ability.attention is not None
        return RowsBackend(
            self.model, self.ability.attention, max_rows=max_rows, max_bytes=max_bytes
        )


@dataclass(eq=False)
class _Known:
    """What is known of running one model."""

    abilities: dict[Any, Ability] = field(default_factory=dict)  # by the state of the model
    probing: threading.Lock = field(default_factory=threading.Lock)
    runner: KeptRunner = field(default_factory=KeptRunner)
    packing: Packing | None = None
    ledger: Ledger = field(default_factory=Ledger)
    draft_models: WeakSet[Any] = field(default_factory=WeakSet)  # Those that were found to fit.

    def keep(self, state: Any, ability: Ability) -> None:
        """Keeps a verdict in place of the oldest, where hooks come and go with each call."""
        if len(self.abilities) == _MOST_STATES:
            del self.abilities[next(iter(self.abilities))]
        self.abilities[state] = ability


class Forwards:
    """What one `SelfSpec` knows of running each model. Safe to use from several threads."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def _of(self, model: Any) -> _Known:
        with self._lock:
            return self._known.setdefault(model, _Known())

    def ability(self, model: Any) -> Ability:
        """What a model can verify as it stands now; tried on first use."""
        known, state = self._of(model), state_of(model)
        with known.probing:  # A second thread waits for the first one's verdict.
            if state not in known.abilities:
                start = perf_counter()
                try:
                    found = probe(model)
                except BrokenTrial as broken:  # The next call tries again.
                    return Ability("plain", str(broken), None)
                taken = (type(model).__name__, found.mode, perf_counter() - start)
                _log.info("%s can verify: %s (tried in %.2f s)", *taken)
                known.keep(state, found)
            return known.abilities[state]

    @contextmanager
    def prepare(
        self, model: Any, config: SpecConfig, ability: Ability | None = None
    ) -> Iterator[Prepared]:
        """How one call is to run the model; what that takes is made here, when it is due."""
        known, ability = self._of(model), ability or self.ability(model)
        prepared = Prepared(model, ability, config, self.costs, known.ledger)
        device = device_for(device_of(model), overlap=False)
        if is_streamed(model):
            self._stream(prepared)
        elif config.forward == "graph" or (config.forward == "auto" and device.can_capture):
            with self._lent(model, prepared.ability.attention, device) as found:
                if isinstance(found, StaticRunner):
                    prepared.runner = found
                else:
                    prepared.note_or_refuse(found)
                yield prepared
            return
        else:
            self._pack(prepared)
        yield prepared

    def draft_models(self, model: Any) -> WeakSet[Any]:
        """The draft models that were found to fit a model."""
        return self._of(model).draft_models

    @contextmanager
    def _lent(
        self, model: Any, attention: AttentionTypes | None, device: Device
    ) -> Iterator[StaticRunner | str]:
        """Yields the runner of captured forwards for one call, or why it can't have it."""
        if attention is None:
            yield "a chain grows the stock KV cache, which has no fixed slots"
        elif not device.can_capture:
            yield f"a {device.name} captures no graphs"
        else:
            with self._of(model).runner.borrow(model, attention) as found:
                yield found

    def _stream(self, prepared: Prepared) -> None:
        """Weights that are in memory are packed in place, since the files have them too."""
        prepared.is_streamed = True
        if may_pack(prepared.config):
            prepared.packing = self.packing(prepared.model)
        if prepared.config.forward not in ("auto", "eager"):
            prepared.note_or_refuse(
                "its weights are streamed, and only plain operations wait for them"
            )

    def _pack(self, prepared: Prepared) -> None:
        """Packs weights at once if that is asked for; else the forwards to come decide when."""
        is_asked = prepared.config.forward == "packed"
        if is_asked or may_pack(prepared.config):
            prepared.packing = self.packing(prepared.model)
            if is_asked and (reason := prepared.packing.pack(whatever_memory=True)) is not None:
                prepared.note_or_refuse(reason)

    def packing(self, model: Any) -> Packing:
        """The packed weights of a model, which is looked at as it is now."""
        packing = self._of(model).packing = Packing.of(model)
        return packing


def may_pack(config: SpecConfig) -> bool:
    """Whether weights may be packed unasked, by the clock.

    Only a measured budget may depend on clocks: with another one a text must not change once a
    trial finds another way to be faster, and in half precision it could.
    """
    return config.forward == "auto" and config.budget == "measured"

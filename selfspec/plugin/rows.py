"""Rows that decode together: those of one call, or those of many calls that come and go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any
from weakref import proxy

from selfspec.cost import Budget, FixedBudget, MeasuredBudget
from selfspec.draft.memory import Memory
from selfspec.draft.sources.draft_model import DraftModelCursor
from selfspec.engine import Decoder, first_tokens
from selfspec.machine.device import Device, device_for
from selfspec.plugin.call import Call
from selfspec.plugin.prompt import teach
from selfspec.records import StepRecord
from selfspec.run.draft_model import DraftText
from selfspec.run.model import num_readable
from selfspec.run.prepared import Prepared
from selfspec.run.prompt import Prompt
from selfspec.run.rows_backend import RowsBackend
from selfspec.sequence import Sequence


class Rows:
    """The rows of one model that share forwards.

    Those of one call come all at once and decode over the KV cache of their prompt. Rows that come
    and go have a `backend` that was made for them.
    """

    def __init__(
        self,
        memory: Callable[[int], Memory],  # what is learned for a vocabulary of some size
        prepared: Prepared,
        backend: RowsBackend | None = None,
    ) -> None:
        self.prepared = prepared
        self._memory = memory
        self._shared = backend
        self._backend: Any = backend
        self._decoder: Decoder | None = None
        self._has_changed = False  # Have rows come or gone since the last step?

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def sequences(self) -> list[Sequence]:
        """The rows that still decode."""
        return [] if self._decoder is None else self._decoder.rows

    def add(self, call: Call, prompt: Prompt) -> list[StepRecord]:
        """Lets the rows of a call join behind a prompt that was read; returns the first tokens.

        They are committed before anything is learned, so that a streamer gets them soon.
        """
        device = device_for(prompt.logits.device, overlap=call.config.overlap)
        rows = call.rows(prompt)
        first = first_tokens(rows, prompt.logits, device)
        memory = self._learned(call, prompt)
        if self._shared is not None:
            positions = prompt.next_positions(call.model)
            self._shared.add_row(prompt.cache, positions, call.need)
            self._shared.kind = self.prepared.kind  # Weights may be packed before a prompt is read.
        else:  # Without rows that come and go, this is the only call.
            self._backend = self.prepared.backend(prompt, reach=call.reach, width=call.width)
        if self._decoder is None:
            self._decoder = self._new_decoder(call, len(rows), device)
        else:
            self._has_changed = True
        decoder = self._decoder
        for row, prediction in zip(rows, call.predictions, strict=True):
            cursor = None
            if call.draft_model is not None:
                text, worth = DraftText(call.draft_model), decoder.budget.worth
                cursor = DraftModelCursor(text, row.prompt_ids, worth, call.reach)
            row.begin(memory, decoder.config, prediction, cursor)
        decoder.add(rows, first)
        return first.records

    def _learned(self, call: Call, prompt: Prompt) -> Memory:
        """What one call works on, by the learning scope, with what the prompt teaches."""
        start = perf_counter()
        memory = self._memory(prompt.logits.shape[-1]).for_request(call.config.learning)
        if memory.learns:
            head = call.model.get_output_embeddings()
            teach(memory, prompt, head, num_readable(call.model))
        call.stats.table_bytes = memory.nbytes
        call.stats.seconds["learn"] += perf_counter() - start  # type: ignore[assignment]
        return memory

    def _new_decoder(self, call: Call, num_rows: int, device: Device) -> Decoder:
        prepared, config = self.prepared, self.prepared.config
        budget: Budget = FixedBudget() if call.budget is None else call.budget.open()
        if call.budget is None and config.budget == "measured":
            curve = prepared.costs.curve(call.model, self._backend, num_rows)
            budget = MeasuredBudget(curve, prepared.ledger)
        if prepared.ability.mode == "chain":
            config = config.changed(top_k=1)
        return Decoder(
            backend=self._backend,
            config=config,
            budget=budget,
            device=device,
            listeners=call.listeners,
            num_readable=num_readable(call.model),
            # Not by a method of ours: in a circle, KV and memory would outlive the call.
            before_step=partial(Rows._keep_up, proxy(self)),
        )

    def _keep_up(self, num_rows: int) -> None:
        """Packs weights between two steps once that pays; then steps cost something else.

        So they do where rows have come or gone.
        """
        prepared, backend = self.prepared, self._backend
        if prepared.may_pack_more:
            left = max((row.max_length - row.length for row in self.sequences), default=0)
            if prepared.before_step(num_rows, left) and backend.kind != prepared.kind:
                backend.kind, self._has_changed = prepared.kind, True
                prepared.ledger.forgive()
        assert self._decoder is not None
        budget = self._decoder.budget
        if self._has_changed and isinstance(budget, MeasuredBudget):
            budget.curve = prepared.costs.curve(prepared.model, backend, num_rows)
        self._has_changed = False

    def run(self) -> None:
        """Steps until every row has stopped."""
        assert self._decoder is not None
        with self.prepared.decoding():
            self._decoder.run()

    def step(self) -> list[StepRecord]:
        """One step of all rows."""
        assert self._decoder is not None
        with self.prepared.decoding():
            return self._decoder.step()

    def stop(self, index: int) -> None:
        """Ends a row where it stands, since nobody reads it any more."""
        for row in self.sequences:
            row.is_done = row.is_done or row.index == index

    def leave(self) -> list[Sequence]:
        """Lets all rows that have stopped leave the forwards, and returns them."""
        left = [] if self._decoder is None else self._decoder.drop_done_rows()
        self._has_changed |= bool(left)
        return left

    def note(self, call: Call) -> None:
        """Notes how the forwards of a call that is over, or broke off, were run."""
        stats, backend = call.stats, self._backend
        stats.forward = backend.kind
        stats.packed_bytes = self.prepared.packed_bytes
        stats.eager_reason = backend.reason or self.prepared.reason
        if call.draft_model is not None:
            stats.num_draft_forwards = call.draft_model.num_forwards

    def close(self, call: Call) -> None:
        """Gives the KV cache of a call its stock layers back, wherever the call broke off."""
        if self._backend is not None:
            self.note(call)
            self._backend.release(fills=call.gives_cache_back)

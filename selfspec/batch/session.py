"""Many prompts over one model: rows of a batch that come and go.

Each prompt is the call that `generate()` would make of it, with rules, text and random numbers of
its own. A prompt is read alone, as `generate()` reads it. Then its KV becomes one more row of the
batch, and the steps of all rows share their forwards. When a row ends, the next prompt takes its
place. So a text is what `generate()` gives for that prompt alone.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from selfspec.batch.answer import Answer
from selfspec.batch.schedule import ArrivalOrder, Scheduler
from selfspec.batch.ticket import Ticket
from selfspec.config import SpecConfig
from selfspec.cost import MeasuredBudget
from selfspec.engine import Decoder, first_tokens
from selfspec.errors import ConfigError, UnsupportedError
from selfspec.machine.amounts import amount_in_bytes
from selfspec.machine.device import device_for
from selfspec.plugin.call import pack_between_steps
from selfspec.plugin.spec import SelfSpec
from selfspec.run.device_of import device_of
from selfspec.run.prepared import Prepared
from selfspec.run.rows_backend import RowsBackend
from selfspec.stats import GenerationStats
from selfspec.verify.verifier import RowVerifiers

__all__ = ["Session"]

_LOOK_AHEAD = 256  # So many prompts wait at most, among which the scheduler may choose.
_STEPS_THAT_TEACH = 16  # Fewer teach too little of costs to be written down.


class Session:
    """Takes prompts and gives answers as they finish; serves one reader.

    `max_memory` is what the keys and values may take, in bytes or as text such as ``"2GB"``, those
    of a prompt that is being read among them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: SelfSpec,
        *,
        max_rows: int = 8,
        max_memory: int | str | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ConfigError(f"max_rows must be a whole number >= 1 (got {max_rows!r})")
        self._model = model
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_rows = max_rows
        self._max_bytes = None if max_memory is None else amount_in_bytes(max_memory)
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._config, self._eager_reason = _config_for_rows(spec.config, model)
        self._waiting: deque[Ticket] = deque()
        self._alone: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._verifiers = RowVerifiers()
        self._decoder: Decoder | None = None
        self._backend: RowsBackend | None = None

    @property
    def num_wanted(self) -> int:
        """How many prompts more may wait now."""
        return _LOOK_AHEAD - len(self._waiting) - len(self._alone)

    @property
    def is_empty(self) -> bool:
        """Does no prompt wait or run?"""
        return not (self._waiting or self._alone or self._running)

    def submit(
        self, index: int, ids: Sequence[int], seed: int | None, arguments: dict[str, Any]
    ) -> None:
        """Lets a prompt wait, with the arguments that `generate()` would get; `index` names it.

        Refuses what `generate()` would refuse, and what can never fit into the memory.
        """
        if not ids:
            raise UnsupportedError("a prompt must have at least one token (got none)")
        ticket = Ticket.of(index, ids, seed, self._model, self._tokenizer, self._spec, arguments)
        if ticket.is_alone:
            self._alone.append(ticket)
            return
        self._check_room(ticket)
        self._waiting.append(ticket)

    def work(self) -> list[Answer]:
        """Starts what fits, then steps until a row ends; returns the answers that are complete.

        Prompts that can't share forwards are decoded one by one, when no row runs.
        """
        if not self._waiting and not self._running:
            return [self._answer_alone(self._alone.popleft())] if self._alone else []
        with torch.no_grad(), self._spec.forwards.prepare(self._model, self._config) as prepared:
            self._admit(prepared)
            answers = self._answers(prepared)
            while not answers:
                self._step(prepared)
                answers = self._answers(prepared)
        return answers

    def _admit(self, prepared: Prepared) -> None:
        """Starts the prompts that the scheduler chooses, as far as there is room for them."""
        backend = self._rows_backend(prepared)
        needs = backend.kv.needs
        for ticket in self._chosen(needs):
            if backend.kv.fits([*backend.kv.needs, ticket.need]):
                self._waiting.remove(ticket)
                self._start(ticket, prepared, backend)
        if self._decoder is not None and isinstance(self._decoder.budget, MeasuredBudget):
            self._decoder.budget.use(prepared.curve(backend, len(self._running)))

    def _chosen(self, needs: Sequence[int]) -> list[Ticket]:
        """The prompts that the scheduler wants to start; one at least if none runs."""
        if not self._waiting:
            return []
        waiting = [ticket.need for ticket in self._waiting]
        chosen = self._scheduler.choose(waiting, needs, self._room(needs))
        if not needs and not chosen:
            chosen = [0]
        return [self._waiting[index] for index in dict.fromkeys(chosen)]

    def _room(self, needs: Sequence[int]) -> int:
        """How many tokens are free beside the rows that run, which all take the longest's room."""
        assert self._backend is not None
        limit = self._backend.max_tokens
        return sys.maxsize if limit is None else limit - len(needs) * max(needs, default=0)

    def _start(self, ticket: Ticket, prepared: Prepared, backend: RowsBackend) -> None:
        """Reads a prompt, gives it a row, and commits its first token."""
        call = ticket.call
        with prepared.reading():
            read = call.read_prompt(prepared)
            memory = call.learn_prompt(read, self._spec.request_memory)
        decoder = self._decoder = self._decoder or self._new_decoder(ticket, prepared, backend)
        (row,) = call.rows(memory, self._config, decoder.budget)
        row.index = ticket.index
        call.stats.table_bytes = memory.nbytes
        self._running[ticket.index] = ticket
        self._verifiers.add(ticket.index, call.verifier(prepared.ability, decoder.device))
        positions = call.model_kwargs["position_ids"][..., -1:]
        backend.add_row(call.model_kwargs["past_key_values"], positions, ticket.need)
        decoder.stats = call.stats
        first = first_tokens(self._verifiers, [row.index], [row.last_token], read.logits)
        with prepared.decoding():
            decoder.add(row, first)

    def _new_decoder(self, ticket: Ticket, prepared: Prepared, backend: RowsBackend) -> Decoder:
        call = ticket.call
        return Decoder(
            backend=backend,
            verifier=self._verifiers,
            rows=[],
            config=self._config,
            stats=GenerationStats(),
            budget=call.budget(prepared, backend, self._max_rows),
            device=device_for(device_of(self._model), overlap=self._config.overlap),
            listeners=call.listeners,
        )

    def _step(self, prepared: Prepared) -> None:
        """One step of all rows. Each one's statistics get its own counts and a share of time."""
        assert self._decoder is not None
        pack_between_steps(prepared, self._decoder)
        of_step = self._decoder.stats = GenerationStats()
        with prepared.decoding():
            records = self._decoder.step()
        for record in records:
            stats = self._running[record.row].call.stats
            stats.count_step(record)
            for stage, seconds in of_step.seconds.items():
                stats.seconds[stage] += seconds / len(records)  # type: ignore[assignment]

    def _answers(self, prepared: Prepared) -> list[Answer]:
        """The answers of the rows that have ended, which leave the batch."""
        assert self._decoder is not None
        return [
            self._end(self._running.pop(row.index), prepared)
            for row in self._decoder.drop_done_rows()
        ]

    def _end(self, ticket: Ticket, prepared: Prepared) -> Answer:
        call, text = ticket.call, self._verifiers.remove(ticket.index).transcript
        call.stats.forward = prepared.kind
        call.stats.eager_reason = self._eager_reason or prepared.reason
        call.stats.packed_bytes = prepared.packed_bytes
        if call.draft_model is not None:
            call.stats.num_draft_forwards = call.draft_model.num_forwards
        if call.stats.num_steps >= _STEPS_THAT_TEACH and not self._running:
            prepared.costs.keep()
        self._spec.forwards.count(self._model, call.stats.num_new_tokens)
        self._spec.count(call)
        self._spec.settle(call)
        return ticket.answer(text.sequences()[0, text.prompt_length :].tolist(), self._tokenizer)

    def _answer_alone(self, ticket: Ticket) -> Answer:
        self._decoder = self._backend = None  # Its own KV takes the memory of the batch's.
        return ticket.answer(ticket.decode_alone(self._spec), self._tokenizer)

    def _check_room(self, ticket: Ticket) -> None:
        """Refuses a prompt that would not fit if it were the only one."""
        if self._max_bytes is None:
            return
        with self._spec.forwards.prepare(self._model, self._config) as prepared:
            backend = self._rows_backend(prepared)
        assert backend.max_tokens is not None
        assert backend.max_prompt is not None
        fix = "raise max_memory, or lower max_rows or max_new_tokens"
        if ticket.need > backend.max_tokens:
            raise UnsupportedError(
                f"prompt, answer and drafts must fit into the {backend.max_tokens} tokens of "
                f"max_memory (got {len(ticket.ids)} tokens in the prompt, {ticket.need} with the "
                f"answer and drafts); {fix}"
            )
        if len(ticket.ids) > backend.max_prompt:
            raise UnsupportedError(
                f"a prompt must fit into the {backend.max_prompt} tokens of max_memory in which "
                f"prompts are read (got {len(ticket.ids)}); {fix}"
            )

    def _rows_backend(self, prepared: Prepared) -> RowsBackend:
        if self._backend is None:
            self._backend = prepared.rows_backend(self._max_rows, self._max_bytes)
        self._backend.kind = prepared.kind
        return self._backend


def _config_for_rows(config: SpecConfig, model: Any) -> tuple[SpecConfig, str | None]:
    """The config with a way to run forwards that rows can come and go in, and why it differs."""
    captures = device_for(device_of(model), overlap=False).can_capture
    if config.forward != "graph" and not (config.forward == "auto" and captures):
        return config, None
    reason = "captured forwards have a fixed number of rows, and here rows come and go"
    if config.forward == "graph" and config.strict:
        raise UnsupportedError(f"strict=True and forward='graph' can't be had: {reason}")
    return config.changed(forward="eager"), reason

"""Many prompts over one model: rows of a batch that come and go.

Each prompt is the call that `generate()` would make of it, with rules, text and random numbers of
its own. A prompt is read alone. Then its KV becomes one more row of the batch, and the steps of all
rows share their forwards. When a row ends, the next prompt takes its place. So a text is what
`generate()` gives for that prompt alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch

from selfspec.batch.pace import ReadingPace
from selfspec.batch.rows import NO_LIMITS, Limits, Rows, config_for_rows
from selfspec.batch.schedule import ArrivalOrder, Scheduler
from selfspec.batch.ticket import Answer, Hear, Ticket
from selfspec.batch.waiting import Waiting
from selfspec.errors import ConfigError, UnsupportedError
from selfspec.machine.memory import amount_in_bytes
from selfspec.plugin.prompt import PromptReader
from selfspec.plugin.spec import SelfSpec
from selfspec.run.prepared import Prepared
from selfspec.run.rows_backend import kv_bytes_per_token
from selfspec.run.tree_kv import foreign_layer

_LOOK_AHEAD = 256  # The most prompts that wait, if the reader asks how many are wanted.
_SHORT_REST = 1.25  # A rest that is little longer than a part is read with it.


class _Reading(NamedTuple):
    """A prompt that is being read, whose place among the rows is kept for it."""

    ticket: Ticket
    reader: PromptReader


class Session:
    """Takes prompts and gives answers as they finish; belongs to one thread.

    `max_memory` is what the keys and values may take, in bytes or as text such as ``"2GB"``, those
    of a prompt that is being read among them. Prompts wait in order of arrival, or with
    `short_first` in that of `Waiting`. With a `pace` a long prompt is read in parts between steps.
    `hear` is told the new tokens of each text at once, and says whether anybody reads on.
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
        short_first: bool = False,
        pace: ReadingPace | None = None,
        hear: Hear | None = None,
    ) -> None:
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ConfigError(f"max_rows must be a whole number >= 1 (got {max_rows!r})")
        self._model = model
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_bytes = None if max_memory is None else amount_in_bytes(max_memory)
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._pace = pace
        self._hear = hear
        self._config, self._eager_reason = config_for_rows(spec.config, model)
        self._waiting = Waiting(short_first=short_first)
        self._reading: _Reading | None = None
        sizes: dict[str, Any] = {"max_rows": max_rows, "max_bytes": self._max_bytes}
        self._rows = Rows(model, spec, self._config, **sizes)
        self._open_forwards = ExitStack()
        self._kept: Prepared | None = None
        self._limits: Limits | None = None
        self._limits_alone: Limits | None = None
        self.alone_reasons: Counter[str] = Counter()  # Why answers were written alone.
        self.index_alone: int | None = None  # The one that is, or broke off.

    @property
    def num_wanted(self) -> int:
        """How many prompts more may wait now."""
        return _LOOK_AHEAD - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """How many prompts wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many texts are being written, or their prompt is being read."""
        is_alone = self.index_alone is not None
        return len(self._rows) + (self._reading is not None) + is_alone

    @property
    def kv_bytes(self) -> int:
        """What is set aside for keys and values."""
        return self._rows.kv_bytes

    @property
    def kv_bytes_in_use(self) -> int:
        """What the keys and values of all rows take."""
        return self._rows.kv_bytes_in_use

    @property
    def is_empty(self) -> bool:
        """Does no prompt wait or run?"""
        return not (self._waiting or self._is_busy)

    @property
    def _is_busy(self) -> bool:
        """Does any row need a step, or any prompt that is being read?"""
        return bool(len(self._rows)) or self._reading is not None

    def open(self) -> None:
        """Finds out what the model can verify and what fits, before the first prompt waits for it.

        Afterwards `ticket` may be called by other threads.
        """
        if self._spec.ability(self._model).mode == "tree":
            self._limits_of_rows()

    def submit(
        self, index: int, ids: Sequence[int], seed: int | None, arguments: dict[str, Any]
    ) -> None:
        """Lets a prompt wait, with the arguments that `generate()` would get; `index` names it.

        Refuses what `generate()` would refuse, and what can never fit into the memory.
        """
        self.add(self.ticket(index, ids, seed, arguments))

    def ticket(
        self, index: int, ids: Sequence[int], seed: int | None, arguments: dict[str, Any]
    ) -> Ticket:
        """The call of a prompt, checked; it does not wait yet."""
        if not ids:
            raise UnsupportedError("a prompt must have at least one token (got none)")
        ticket = Ticket.of(index, ids, seed, self._model, self._tokenizer, self._spec, arguments)
        self._limits_for(ticket).check(ticket)
        return ticket

    def add(self, ticket: Ticket) -> None:
        """Lets a ticket wait."""
        self._waiting.add(ticket)

    def waiting_indices(self) -> list[int]:
        """The names of the prompts that wait."""
        return self._waiting.indices()

    def cancel(self, index: int) -> bool:
        """Forgets a prompt whose answer nobody wants, wherever it is; False if it is not here."""
        if self._waiting.leave(index):
            return True
        reading = self._reading
        if reading is not None and reading.ticket.index == index:
            self._reading = None
            ticket: Ticket | None = reading.ticket
        else:
            ticket = self._rows.drop(index)
        if ticket is not None:
            self._spec.count(ticket.call)
        return ticket is not None

    def work(self) -> list[Answer]:
        """Steps until an answer is complete, or nothing is left to do; returns those that are."""
        answers: list[Answer] = []
        while not answers and not self.is_empty:
            answers = self.step()
        return answers

    def step(self) -> list[Answer]:
        """Reads on in prompts for which there is a place, and lets all rows make one step.

        Returns the answers that are complete. A prompt that can't share forwards is answered from
        beginning to end when its turn comes and no row runs.
        """
        ticket = self._waiting.next_alone
        if ticket is not None and not self._is_busy:
            return self._answer_alone(ticket)
        if self.is_empty:
            return []
        with self._prepared() as prepared:
            self._read(prepared)
            answers = self._ended(prepared)
            if len(self._rows):
                self._step(prepared)
                answers += self._ended(prepared)
        return answers

    @contextmanager
    def _prepared(self) -> Iterator[Prepared]:
        """How forwards are run. With no row there, it is asked anew, which looks at all weights."""
        if self._kept is None or not self._is_busy:
            self._open_forwards.close()
            preparing = self._spec.forwards.prepare(self._model, self._config)
            self._kept = self._open_forwards.enter_context(preparing)
        with torch.no_grad():
            yield self._kept

    def _read(self, prepared: Prepared) -> None:
        """Reads prompts until nothing more can start, or until as much was read as may be."""
        left = sys.maxsize if self._pace is None else self._pace.num_tokens(len(self._rows))
        while left > 0 and (self._reading is not None or self._begin(prepared)):
            left -= self._read_part(left, prepared)

    def _begin(self, prepared: Prepared) -> bool:
        """Takes the first of those prompts that the scheduler wants to start and that fits."""
        if len(self._rows) == self._rows.max_rows or not (sharing := self._waiting.sharing()):
            return False
        backend = self._rows.open(prepared)
        needs, limit = backend.kv.needs, backend.max_tokens
        # All rows take the room of the longest one.
        taken = len(needs) * max(needs, default=0)
        room = sys.maxsize if limit is None else limit - taken
        chosen = self._scheduler.choose([ticket.need for ticket in sharing], needs, room)
        if not needs and not chosen:
            chosen = [0]
        for index in chosen:
            ticket = sharing[index]
            if backend.kv.fits([*needs, ticket.need]):
                self._waiting.start(ticket)
                self._reading = _Reading(ticket, PromptReader(ticket.call))
                return True
        return False

    def _read_part(self, num_tokens: int, prepared: Prepared) -> int:
        """Reads on in the present prompt, and starts its row at the end; returns how much."""
        assert self._reading is not None
        ticket, reader = self._reading
        start, before = perf_counter(), reader.num_left
        is_nearly_all = before <= _SHORT_REST * num_tokens
        with prepared.reading():
            prompt = reader.read(prepared, before if is_nearly_all else num_tokens)
        num_read = before - reader.num_left
        if self._pace is not None:
            self._pace.observe_part(num_read, perf_counter() - start)
        if prompt is not None:
            self._reading = None
            self._tell(self._rows.start(ticket, prompt, prepared))
        return num_read

    def _step(self, prepared: Prepared) -> None:
        start = perf_counter()
        committed = self._rows.step(prepared)
        if self._pace is not None:
            self._pace.observe_step(perf_counter() - start)
        self._tell(committed)

    def _tell(self, committed: dict[int, list[int]]) -> None:
        for index, ids in committed.items():
            if self._hear is not None and not self._hear(index, ids):
                self.cancel(index)

    def _ended(self, prepared: Prepared) -> list[Answer]:
        """The answers of the rows that have ended, which leave the batch."""
        answers = []
        for ticket, ids in self._rows.ended():
            call = ticket.call
            call.note(prepared, self._rows.open(prepared))
            call.stats.eager_reason = self._eager_reason or call.stats.eager_reason
            self._spec.finish(call, drafted=True, is_last=not len(self._rows))
            answers.append(ticket.answer(ids, call.stats, self._tokenizer))
        return answers

    def _answer_alone(self, ticket: Ticket) -> list[Answer]:
        self._rows.close()  # Its own KV takes the memory of the batch's.
        self._waiting.start(ticket)
        self.alone_reasons[str(ticket.alone_reason)] += 1
        self.index_alone = ticket.index
        ids = ticket.decode_alone(self._spec, self._hear)
        self.index_alone = None
        return [] if ids is None else [ticket.answer(ids, self._spec.stats, self._tokenizer)]

    def _limits_for(self, ticket: Ticket) -> Limits:
        """What fits into the memory beside whatever may be there with this ticket."""
        if self._max_bytes is None:
            return NO_LIMITS
        if not ticket.is_alone:
            return self._limits_of_rows()
        # A recurrent or windowed state takes little room.
        cache = ticket.call.model_kwargs.get("past_key_values")
        if not hasattr(cache, "layers") or foreign_layer(cache) is not None:
            return NO_LIMITS
        if self._limits_alone is None:  # To find out takes a forward over one token.
            most = self._max_bytes // kv_bytes_per_token(self._model)
            self._limits_alone = Limits(most, most)
        return self._limits_alone

    def _limits_of_rows(self) -> Limits:
        if self._limits is None:
            with self._prepared() as prepared:
                backend = self._rows.open(prepared)
                self._limits = Limits(backend.max_tokens, backend.max_prompt)
        return self._limits

"""Many prompts over one model: rows of a batch that come and go.

Each prompt is the call that `generate()` would make of it, with rules, text and random numbers of
its own. A prompt is read alone. Then its KV becomes one more row of the batch, and the steps of all
rows share their forwards. When a row ends, the next prompt takes its place. So a text is what
`generate()` gives for that prompt alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch

from selfspec.batch.pace import ReadingPace
from selfspec.batch.prompt_call import Answer, Hear, call_for
from selfspec.batch.schedule import ArrivalOrder, Scheduler
from selfspec.batch.waiting import Waiting
from selfspec.compat.generation import kv_of
from selfspec.compat.modules import inside_wrappers
from selfspec.config import SpecConfig
from selfspec.errors import ConfigError, UnsupportedError
from selfspec.machine.device import device_for
from selfspec.machine.memory import amount_in_bytes
from selfspec.plugin.call import Call
from selfspec.plugin.prompt import PromptReader
from selfspec.plugin.rows import Rows
from selfspec.plugin.spec import SelfSpec
from selfspec.records import StepRecord
from selfspec.run.model import device_of
from selfspec.run.rows_backend import RowsBackend, kv_bytes_per_token
from selfspec.run.tree_kv import foreign_layer

_LOOK_AHEAD = 256  # The most prompts that wait, if the reader asks how many are wanted.
_SHORT_REST = 1.25  # A rest that is little longer than a part is read with it.
_FIX = "raise max_memory, or lower max_rows or max_new_tokens"


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
        self._model = inside_wrappers(model)
        self._wrapper = model  # Its generate() may do more than that of the model.
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_rows = max_rows
        self._max_bytes = None if max_memory is None else amount_in_bytes(max_memory)
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._pace = pace
        self._hear = hear
        self._config, self._eager_reason = _config_for_rows(spec.config, self._model)
        self._waiting = Waiting(short_first=short_first)
        self._reading: PromptReader | None = None  # Its place among the rows is kept for it.
        self._open_forwards = ExitStack()
        self._rows: Rows | None = None
        self._backend: RowsBackend | None = None
        self._running: dict[int, Call] = {}  # The calls of the rows, by index.
        self._unread: set[int] = set()  # Those of them that nobody waits for any more.
        # How many tokens fit, and how many a prompt may have; beside no other row, and else.
        self._limits: dict[bool, tuple[int | None, int | None]] = {}
        self.alone_reasons: Counter[str] = Counter()  # Why answers were written alone.
        self.index_alone: int | None = None  # The one that is, or broke off.

    @property
    def num_wanted(self) -> int:
        """How many prompts more may wait now."""
        return _LOOK_AHEAD - len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many texts are being written, or their prompt is being read."""
        is_alone = self.index_alone is not None
        return len(self._running) + (self._reading is not None) + is_alone

    @property
    def kv_bytes(self) -> int:
        """What is set aside for keys and values."""
        return 0 if self._backend is None else self._backend.kv.nbytes

    @property
    def kv_bytes_in_use(self) -> int:
        """What the keys and values of all rows take."""
        return 0 if self._backend is None else self._backend.kv.bytes_in_use

    @property
    def is_empty(self) -> bool:
        """Does no prompt wait or run?"""
        return not (self._waiting or self._is_busy)

    @property
    def _is_busy(self) -> bool:
        """Does any row need a step, or any prompt that is being read?"""
        return bool(self._running) or self._reading is not None

    def open(self) -> None:
        """Finds out what the model can verify and what fits, before the first prompt waits for it.

        Afterwards `call` may be called by other threads.
        """
        if self._spec.ability(self._model).mode == "tree":
            self._ready()
            if self._max_bytes is not None:
                self._limits[False] = self._found_limits(self._max_bytes, is_alone=False)

    def submit(
        self, index: int, ids: Sequence[int], seed: int | None, arguments: dict[str, Any]
    ) -> None:
        """Lets a prompt wait, with the arguments that `generate()` would get; `index` names it.

        Refuses what `generate()` would refuse, and what can never fit into the memory.
        """
        self.add(self.call(index, ids, seed, arguments))

    def call(
        self, index: int, ids: Sequence[int], seed: int | None, arguments: dict[str, Any]
    ) -> Call:
        """The call of a prompt, checked; it does not wait yet."""
        if not ids:
            raise UnsupportedError("a prompt must have at least one token (got none)")
        call = call_for(index, ids, seed, self._wrapper, self._tokenizer, self._spec, arguments)
        if self._max_bytes is not None:
            self._check_fits(call, self._max_bytes)
        return call

    def add(self, call: Call) -> None:
        """Lets a call wait."""
        self._waiting.add(call)

    def cancel(self, index: int) -> bool:
        """Forgets a prompt whose answer nobody wants, wherever it is; False if it is not here."""
        if self._waiting.leave(index):
            return True
        if self._reading is not None and self._reading.call.index == index:
            self._spec.count(self._reading.call)
            self._reading = None
            return True
        if self._rows is None or index not in self._running or index in self._unread:
            return False
        self._rows.stop(index)
        self._unread.add(index)
        return True

    def work(self) -> list[Answer]:
        """Steps until an answer is complete, or nothing is left to do; returns those that are."""
        answers: list[Answer] = []
        while not answers and not self.is_empty:
            answers = self.step()
        return answers

    @torch.no_grad()
    def step(self) -> list[Answer]:
        """Reads on in prompts for which there is a place, and lets all rows make one step.

        Returns the answers that are complete. A prompt that can't share forwards is answered from
        beginning to end when its turn comes and no row runs.
        """
        call = self._waiting.next_alone
        if call is not None and not self._is_busy:
            return self._answer_alone(call)
        if self.is_empty:
            return []
        rows = self._ready()
        answers = self._ended(rows)
        self._read(rows)
        answers += self._ended(rows)
        if len(rows):
            start = perf_counter()
            records = rows.step()
            if self._pace is not None:
                self._pace.observe_step(perf_counter() - start)
            self._tell(records)
            answers += self._ended(rows)
        return answers

    def _ready(self) -> Rows:
        """The rows, and how forwards are run: asked anew with no row there, for all weights."""
        if self._rows is None or not self._is_busy:
            self._open_forwards.close()
            preparing = self._spec.forwards.prepare(self._model, self._config)
            prepared = self._open_forwards.enter_context(preparing)
            if self._backend is None:
                self._backend = prepared.rows_backend(self._max_rows, self._max_bytes)
            self._backend.kind = prepared.kind
            self._rows = Rows(self._spec.learned, prepared, self._backend)
        return self._rows

    def _read(self, rows: Rows) -> None:
        """Reads prompts until nothing more can start, or until as much was read as may be."""
        left = sys.maxsize if self._pace is None else self._pace.num_tokens(len(rows))
        while left > 0:
            self._reading = self._reading or self._next_to_read()
            if self._reading is None:
                return
            left -= self._read_part(self._reading, left, rows)

    def _next_to_read(self) -> PromptReader | None:
        """The first of those prompts that the scheduler wants to start and that fits."""
        sharing = self._waiting.sharing()
        if len(self._running) == self._max_rows or not sharing:
            return None
        assert self._backend is not None
        needs, limit = self._backend.kv.needs, self._backend.max_tokens
        # All rows take the room of the longest one.
        taken = len(needs) * max(needs, default=0)
        room = sys.maxsize if limit is None else limit - taken
        chosen = self._scheduler.choose([call.need for call in sharing], needs, room)
        if not needs and not chosen:
            chosen = [0]
        fitting = (i for i in chosen if self._backend.kv.fits([*needs, sharing[i].need]))
        first = next(fitting, None)
        if first is None:
            return None
        self._waiting.start(sharing[first])
        return PromptReader(sharing[first])

    def _read_part(self, reader: PromptReader, num_tokens: int, rows: Rows) -> int:
        """Reads on in a prompt, and starts its row at the end; returns how much was read."""
        start, before, call = perf_counter(), reader.num_left, reader.call
        is_nearly_all = before <= _SHORT_REST * num_tokens
        with rows.prepared.reading():
            prompt = reader.read(rows.prepared, before if is_nearly_all else num_tokens)
            num_read = before - reader.num_left
            if self._pace is not None:
                self._pace.observe_part(num_read, perf_counter() - start)
            if prompt is not None:
                self._reading = None
                self._running[call.index] = call
                self._tell(rows.add(call, prompt))
        return num_read

    def _tell(self, records: list[StepRecord]) -> None:
        for record in records:
            if self._hear is not None and not self._hear(record.row, record.committed_ids):
                self.cancel(record.row)

    def _ended(self, rows: Rows) -> list[Answer]:
        """The answers of the rows that have ended, which leave the batch."""
        answers = []
        for row in rows.leave():
            call = self._running.pop(row.index)
            if row.index in self._unread:
                self._unread.remove(row.index)
                self._spec.count(call)
                continue
            rows.note(call)
            call.stats.eager_reason = self._eager_reason or call.stats.eager_reason
            self._spec.finish(call, drafted=True, is_last=not len(rows))
            answers.append(Answer.to(call, row.new_ids, call.stats, self._tokenizer))
        return answers

    def _answer_alone(self, call: Call) -> list[Answer]:
        self._rows = self._backend = None  # Its own KV takes the memory of the batch's.
        self._waiting.start(call)
        self.alone_reasons[str(call.alone_reason)] += 1
        self.index_alone = index = call.index
        assert call.decode_alone is not None
        ids = call.decode_alone(lambda ids: self._hear is None or self._hear(index, ids))
        self.index_alone = None
        return [] if ids is None else [Answer.to(call, ids, self._spec.stats, self._tokenizer)]

    def _check_fits(self, call: Call, max_bytes: int) -> None:
        """Refuses a prompt that would not fit into the memory if it were the only one."""
        is_alone = call.alone_reason is not None
        if is_alone:
            cache = kv_of(call.model_kwargs)
            if not hasattr(cache, "layers") or foreign_layer(cache) is not None:
                return  # A recurrent or windowed state takes little room.
        if is_alone not in self._limits:
            self._limits[is_alone] = self._found_limits(max_bytes, is_alone=is_alone)
        most, most_read = self._limits[is_alone]
        if most is not None and call.need > most:
            raise UnsupportedError(
                f"prompt, answer and drafts must fit into the {most} tokens of max_memory (got "
                f"{call.num_tokens} tokens in the prompt, {call.need} with the answer and drafts); "
                f"{_FIX}"
            )
        if most_read is not None and call.num_tokens > most_read:
            raise UnsupportedError(
                f"a prompt must fit into the {most_read} tokens of max_memory in which prompts "
                f"are read (got {call.num_tokens}); {_FIX}"
            )

    def _found_limits(self, max_bytes: int, *, is_alone: bool) -> tuple[int | None, int | None]:
        """To find out takes a forward over one token."""
        if is_alone:
            most = max_bytes // kv_bytes_per_token(self._model)
            return most, most
        self._ready()
        assert self._backend is not None
        return self._backend.max_tokens, self._backend.max_prompt


def _config_for_rows(config: SpecConfig, model: Any) -> tuple[SpecConfig, str | None]:
    """The config with a way to run forwards that rows can come and go in, and why it differs."""
    captures = device_for(device_of(model), overlap=False).can_capture
    if config.forward != "graph" and not (config.forward == "auto" and captures):
        return config, None
    reason = "captured forwards have a fixed number of rows, and here rows come and go"
    if config.forward == "graph" and config.strict:
        raise UnsupportedError(f"strict=True and forward='graph' can't be had: {reason}")
    return config.changed(forward="eager"), reason

"""Many prompts over one model: rows of a batch that come and go.

Each prompt is the call that `generate()` would make of it, with rules, text and random numbers of
its own. A prompt is read alone. Then its KV becomes one more row of the batch, and the steps of all
rows share their forwards. When a row ends, the next prompt takes its place. So a text is what
`generate()` gives for that prompt alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable
from contextlib import ExitStack
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from selfspec.batch.guides import Guides
from selfspec.batch.pace import ReadingPace
from selfspec.batch.prompt_call import (
    Answer,
    OnToken,
    PromptCall,
    PromptInputs,
    ReaderGone,
    call_for,
)
from selfspec.batch.schedule import Scheduler, Waiting
from selfspec.compat.generation import kv_of
from selfspec.compat.modules import inside_wrappers
from selfspec.engine import Engine
from selfspec.errors import ConfigError, UnsupportedError
from selfspec.forward.inputs import foreign_layer
from selfspec.forward.room import Limits
from selfspec.forward.tree_kv import TreeKV
from selfspec.machine.memory import amount_in_bytes
from selfspec.plugin.spec import SelfSpec
from selfspec.row import Row
from selfspec.weights.streamed.memory_plan import kv_bytes

_LOOK_AHEAD = 256  # `num_wanted` lets this many prompts wait.
_SHORT_REST = 1.25  # If at most 1.25 parts of a prompt are left, they are read as one.


class Session:
    """Takes prompts and gives answers as they finish; belongs to one thread.

    `max_memory` is what the keys and values may take, in bytes or as text such as ``"2GB"``, those
    of a prompt that is being read among them. Prompts wait in order of arrival, or with
    `short_first` in that of `Waiting`. With a `pace` a long prompt is read in parts between steps.
    `on_token` gets each token of each text at once, and says whether anybody reads on.

    Prompts that begin alike are read once while one of them is written. With `keeps_kv`, what the
    running texts leave of `max_memory` keeps others that have ended, unless the knob says less.
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
        on_token: OnToken | None = None,
        keeps_kv: bool = False,
    ) -> None:
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ConfigError(f"max_rows must be a whole number >= 1 (got {max_rows!r})")
        self._model = inside_wrappers(model)
        self._wrapper = model  # Its generate() may do more than that of the model.
        self._tokenizer = tokenizer
        self._guides = Guides(tokenizer, self._model)
        self._spec = spec
        self._max_rows = max_rows
        self._max_bytes = None if max_memory is None else amount_in_bytes(max_memory)
        self._pace = pace
        self._on_token = on_token
        self._keeps_kv = keeps_kv or spec.config.kept_kv is not None
        self._runner = spec.models.run(self._model)
        self._waiting = Waiting(scheduler, short_first=short_first)
        self._reading: PromptCall | None = None  # Its place among the rows is kept for it.
        self._engine: Engine | None = None
        self._kv: TreeKV | None = None  # That of the engine.
        self._running: dict[int, PromptCall] = {}  # By the index of its row.
        self._lent = ExitStack()  # What the engine runs its forwards on.
        self.alone_reasons: Counter[str] = Counter()  # Why answers were written alone.
        self._answers: list[Answer] = []  # `step` returns them at its end.

    @property
    def num_wanted(self) -> int:
        return _LOOK_AHEAD - len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many texts are being written, the one whose prompt is being read among them."""
        return len(self._running) + (self._reading is not None)

    @property
    def kv_bytes_in_use(self) -> int:
        """The memory that the keys and values of all rows fill."""
        # Another thread may ask, while this one gives them up.
        kv, num_tokens = self._kv, sum(row.kv.length for row in self._rows)
        return 0 if kv is None else kv.bytes_each * num_tokens

    @property
    def kept_kv_bytes(self) -> int:
        """The memory that keys and values of texts take that have ended."""
        return self._runner.kept_kv_bytes

    @property
    def is_empty(self) -> bool:
        """Is nothing left to do? Then other calls may use the model, whose KV was given up."""
        return not (self._waiting or self.num_running or self._engine is not None)

    @cached_property
    def _limits(self) -> Limits:
        return self._runner.limits(self._max_rows, self._max_bytes)

    @property
    def _rows(self) -> list[Row]:
        return [] if self._engine is None else self._engine.rows

    def open(self) -> None:
        """Finds out what the model can verify and what fits, before the first prompt waits for it.

        Refuses a memory in which nothing fits. Afterwards `call` may be called by other threads.
        """
        if self._spec.ability(self._model).mode == "tree":
            self._ready()
            self._close()
        self.call(0, [0], 0, {"max_new_tokens": 1})

    def submit(
        self, index: int, prompt: PromptInputs, seed: int | None, arguments: dict[str, Any]
    ) -> None:
        """Lets a prompt wait, with the arguments that `generate()` would get; `index` names it.

        Refuses what `generate()` would refuse, and what can never fit into the memory.
        """
        self.add(self.call(index, prompt, seed, arguments))

    def call(
        self,
        index: int,
        prompt: PromptInputs,
        seed: int | None,
        arguments: dict[str, Any],
        scope: Hashable = None,
    ) -> PromptCall:
        """The call of a prompt, checked; it does not wait yet.

        With ``learning="request"`` only prompts of the same `scope` are read together.
        """
        if not prompt:
            raise UnsupportedError("a prompt must have at least one token (got none)")
        asked = (self._wrapper, self._tokenizer, self._spec, self._guides.applied(**arguments))
        call = call_for(index, prompt, seed, *asked, self._on_token, scope)
        if self._max_bytes is not None:
            self._check_fits(call, self._max_bytes)
        return call

    def add(self, call: PromptCall) -> None:
        reading = self._reading is not None and self._reading.index == call.index
        if call.index in self._waiting or call.index in self._running or reading:
            raise UnsupportedError(
                f"index must name no other text of the session that waits or is written (got "
                f"{call.index}); count on, or wait for its answer"
            )
        self._waiting.add(call)

    def cancel(self, index: int) -> None:
        """Ends a text without an answer, in the next step; does nothing if there is none."""
        self._waiting.leave(index)
        if self._reading is not None and self._reading.index == index:
            self._spec.count(self._reading.call.stats)
            self._reading = None
        for row in self._rows:
            if row.index == index:
                row.fail(ReaderGone())

    def work(self) -> list[Answer]:
        """Steps until an answer is complete, or nothing is left to do."""
        answers: list[Answer] = []
        while not answers and not self.is_empty:
            answers = self.step()
        return answers

    @torch.no_grad()
    def step(self) -> list[Answer]:
        """Reads on in prompts for which there is a place, and lets all rows make one step.

        Returns the answers that are complete. A prompt that can't share forwards is answered when
        its turn comes and no row runs. An error is the answer of the prompt that it belongs to, or
        of all rows, if it may have left any of them in pieces. What prevents that the model is made
        ready is the answer of the next prompt; for the one after it, that is tried anew.
        """
        first = self._waiting.first
        if first is not None and first.alone_reason is not None and not self.num_running:
            self._answer_alone(first)
        elif not self.is_empty:
            self._step_together()
        answers, self._answers = self._answers, []
        return answers

    def _step_together(self) -> None:
        try:
            engine = self._ready()
        except Exception as error:  # Such as one of memory. Other prompts may find it free again.
            self._refuse_next(error)
            return
        try:
            self._let_out(engine)
            self._read(engine)
            self._let_out(engine)
            if engine.rows:
                start = perf_counter()
                engine.step()
                if self._pace is not None:
                    self._pace.observe_step(perf_counter() - start)
                self._let_out(engine)
        except Exception as error:
            self._break_off(error) if self._running else self._refuse_next(error)
        finally:
            if not self.num_running:
                self._close()

    def _ready(self) -> Engine:
        """The engine, which is made for the first row after a time in which none was there."""
        if self._engine is None:
            runner = self._runner
            lent = runner.backend(runner.ability(), self._limits)
            backend = self._lent.enter_context(lent)
            self._engine, self._kv = self._spec.engine(runner, backend, keeps_kv=True), backend.kv
        return self._engine

    def _close(self) -> None:
        """Gives up the KV: others may use the model until the next row, and change its weights."""
        self._engine = self._kv = None
        self._lent.close()

    def _read(self, engine: Engine) -> None:
        """Reads prompts until no more can start, or until the pace wants the next step."""
        left = sys.maxsize if self._pace is None else self._pace.num_tokens(len(engine.rows))
        while left > 0:
            asked = self._reading = self._reading or self._next_to_read()
            if asked is None:
                return
            try:
                left -= self._read_part(asked, left, engine)
            except Exception as error:
                self._reading = None
                left -= asked.call.num_tokens
                self._end(asked, [], error)

    def _next_to_read(self) -> PromptCall | None:
        if len(self._running) == self._max_rows:
            return None
        return self._waiting.start_next([row.kv.max_columns for row in self._rows], self._limits)

    def _read_part(self, asked: PromptCall, num_tokens: int, engine: Engine) -> int:
        """Reads on in a prompt, and starts its row at the end; returns how much was read."""
        request = asked.request
        assert request is not None
        if not request.reader.has_begun:
            self._limit_kept_kv(engine, asked)
            engine.begin(request)
        start, before = perf_counter(), request.reader.num_left
        is_nearly_all = before <= _SHORT_REST * num_tokens
        is_read = engine.admit(request, before if is_nearly_all else num_tokens) is not None
        num_read = before - request.reader.num_left
        if self._pace is not None:
            self._pace.observe_part(num_read, perf_counter() - start)
        if is_read:
            if self._reading is None:  # It was cancelled while its first token was handed on.
                engine.rows[-1].fail(ReaderGone())
            self._reading, self._running[asked.index] = None, asked
        return num_read

    def _limit_kept_kv(self, engine: Engine, coming: PromptCall) -> None:
        """Leaves texts that have ended what those need not that run, with the one that comes."""
        if self._keeps_kv and self._max_bytes is not None and self._kv is not None:
            running = [row.kv.max_columns for row in engine.rows]
            longest = max(self._kv.num_columns, coming.max_columns, *running)
            engine.limit_kept_kv(self._max_bytes - self._limits.bytes_for(longest))

    def _let_out(self, engine: Engine) -> None:
        for row in engine.leave():
            asked = self._running.pop(row.index)
            if asked.request is not None:
                engine.record_outcome(asked.request)
            self._end(asked, row.new_ids, row.error)

    def _end(self, asked: PromptCall, ids: list[int], error: Exception | None = None) -> None:
        """Counts a call that has ended or broken off, and answers it, with whatever fails there."""
        try:
            if error is None:
                self._spec.finish(asked.call)
            else:
                self._spec.count(asked.call.stats)
        except Exception as fault:
            error = error or fault
        self._answer(asked, ids, error)

    def _answer(self, asked: PromptCall, ids: list[int], error: Exception | None) -> None:
        if not isinstance(error, ReaderGone):
            self._answers.append(Answer.to(asked, ids, self._tokenizer, error))

    def _refuse_next(self, error: Exception) -> None:
        """Answers the next prompt with an error: the model could not be made ready for it."""
        asked = self._reading or self._waiting.first
        assert asked is not None
        self._reading = None
        self._waiting.leave(asked.index)
        self._end(asked, [], error)

    def _break_off(self, error: Exception) -> None:
        """Answers all rows with an error, after which nobody knows how much of a step was done."""
        written = {row.index: row.new_ids for row in self._rows}
        for index, asked in self._running.items():
            self._end(asked, written.get(index, []), error)
        self._running.clear()
        self._close()

    def _answer_alone(self, asked: PromptCall) -> None:
        self._close()  # Its own KV takes the memory of the batch's.
        self._waiting.start(asked)
        self.alone_reasons[str(asked.alone_reason)] += 1
        self._running[asked.index] = asked
        try:
            self._answer(asked, *asked.decode_alone())
        finally:
            del self._running[asked.index]

    def _check_fits(self, asked: PromptCall, max_bytes: int) -> None:
        if asked.alone_reason is not None:
            cache = kv_of(asked.call.model_kwargs)
            if not hasattr(cache, "layers") or foreign_layer(cache) is not None:
                return  # A recurrent or windowed state takes little room.
            most = most_read = max_bytes // kv_bytes(self._model, 1)
        else:
            most = (self._limits.max_tokens or 0) - self._limits.spare
            most_read = most // self._max_rows  # All places are set aside while one is read.
        if asked.max_columns > most or asked.call.num_tokens > most_read:
            raise UnsupportedError(
                f"prompt, answer and drafts must fit into the {most} tokens of max_memory, and the "
                f"prompt into {most_read} while it is read (got {asked.max_columns}, "
                f"{asked.call.num_tokens} of them in the prompt); raise max_memory, or lower "
                "max_rows or max_new_tokens"
            )

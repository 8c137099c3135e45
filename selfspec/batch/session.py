"""Many prompts over one model: rows of a batch that come and go.

Each prompt is the call that `generate()` would make of it, with rules, text and random numbers of
its own. A prompt is read alone. Then its KV becomes one more row of the batch, and the steps of all
rows share their forwards. When a row ends, the next prompt takes its place. So a text is what
`generate()` gives for that prompt alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from selfspec.batch.guides import Guides, guide_of
from selfspec.batch.pace import ReadingPace
from selfspec.batch.prompt_call import Answer, Hear, PromptCall, PromptInputs, call_for
from selfspec.batch.schedule import ArrivalOrder, Scheduler, Waiting
from selfspec.compat.generation import kv_of
from selfspec.compat.modules import inside_wrappers
from selfspec.engine import Engine
from selfspec.errors import ConfigError, SelfSpecError, UnsupportedError
from selfspec.forward.backends import TreeBackend
from selfspec.forward.model import vocab_size
from selfspec.forward.tree_kv import foreign_layer
from selfspec.machine.memory import amount_in_bytes
from selfspec.plugin.row_rules import end_ids
from selfspec.plugin.spec import SelfSpec
from selfspec.weights.streamed.memory_plan import kv_bytes

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
        self._guides: Guides | None = None  # Made for the first schema.
        self._spec = spec
        self._max_rows = max_rows
        self._max_bytes = None if max_memory is None else amount_in_bytes(max_memory)
        self._scheduler = ArrivalOrder() if scheduler is None else scheduler
        self._pace = pace
        self._hear = hear
        self._run = spec.models.run(self._model)
        self._waiting = Waiting(short_first=short_first)
        self._reading: PromptCall | None = None  # Its place among the rows is kept for it.
        self._engine: Engine | None = None
        self._backend: TreeBackend | None = None
        self._running: dict[int, PromptCall] = {}  # The calls of the rows, by index.
        self._unread: set[int] = set()  # Those of them that nobody waits for any more.
        # How many tokens fit, and how many a prompt may have; by whether it is alone.
        self._limits: dict[bool, tuple[int | None, int | None]] = {}
        self.alone_reasons: Counter[str] = Counter()  # Why answers were written alone.
        self._is_alone = False  # Is one written so now?
        self._answers: list[Answer] = []  # Those that are complete, for the end of the step.

    @property
    def num_wanted(self) -> int:
        """How many prompts more may wait now."""
        return _LOOK_AHEAD - len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many texts are being written, or their prompt is being read."""
        return len(self._running) + (self._reading is not None) + self._is_alone

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

        Refuses a memory in which nothing fits. Afterwards `call` may be called by other threads.
        """
        if self._spec.ability(self._model).mode == "tree":
            self._ready()
            if self._max_bytes is not None:
                self._limits = {
                    is_alone: self._found_limits(self._max_bytes, is_alone=is_alone)
                    for is_alone in (False, True)
                }
        self.call(0, [0], 0, {"max_new_tokens": 1})

    def submit(
        self, index: int, prompt: PromptInputs, seed: int | None, arguments: dict[str, Any]
    ) -> None:
        """Lets a prompt wait, with the arguments that `generate()` would get; `index` names it.

        Refuses what `generate()` would refuse, and what can never fit into the memory.
        """
        self.add(self.call(index, prompt, seed, arguments))

    def call(
        self, index: int, prompt: PromptInputs, seed: int | None, arguments: dict[str, Any]
    ) -> PromptCall:
        """The call of a prompt, checked; it does not wait yet."""
        if not prompt:
            raise UnsupportedError("a prompt must have at least one token (got none)")
        if "schema" in arguments:
            arguments = self._guided(**arguments)
        streamer = None if self._hear is None else _Listener(self._hear, index, self._drop)
        asked = (self._wrapper, self._tokenizer, self._spec, arguments, streamer)
        call = call_for(index, prompt, seed, *asked)
        if self._max_bytes is not None:
            self._check_fits(call, self._max_bytes)
        return call

    def _guided(self, *, schema: Any, **arguments: Any) -> dict[str, Any]:
        """The arguments with a processor for one text in place of its schema."""
        if schema is None:
            return arguments
        if self._guides is None:
            tokenizer = getattr(self._tokenizer, "tokenizer", self._tokenizer)
            ends = end_ids(self._model.generation_config) or [tokenizer.eos_token_id]
            self._guides = Guides(tokenizer, ends, vocab_size(self._model))
        processor = self._guides.processor(guide_of(schema))
        given = arguments.get("logits_processor") or ()
        return {**arguments, "logits_processor": [*given, processor]}

    def add(self, call: PromptCall) -> None:
        """Lets a call wait."""
        self._waiting.add(call)

    def cancel(self, index: int) -> bool:
        """Forgets a prompt whose answer nobody wants, wherever it is; False if it is not here."""
        if self._waiting.leave(index):
            return True
        if self._reading is not None and self._reading.index == index:
            self._spec.count(self._reading.stats)
            self._reading = None
            return True
        if self._engine is None or index not in self._running or index in self._unread:
            return False
        self._engine.stop(index)
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
        beginning to end when its turn comes and no row runs. An error is the answer of the prompt
        that it belongs to. One that may have left any row in pieces is the answer of all rows.
        """
        call = self._waiting.next_alone
        if call is not None and not self._is_busy:
            self._answer_alone(call)
        elif not self.is_empty:
            self._step_together()
        answers, self._answers = self._answers, []
        return answers

    def _step_together(self) -> None:
        try:
            engine = self._ready()
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
            self._break_off(error)

    def _ready(self) -> Engine:
        """What decodes; with no row there, the model and its weights are looked at anew."""
        if self._engine is None or not self._is_busy:
            self._engine = None
            self._run.renew()
            if self._backend is None:
                sizes: Any = {"max_rows": self._max_rows, "max_bytes": self._max_bytes}
                self._backend = self._run.shared_backend(self._run.ability(), **sizes)
            self._engine = self._spec.engine(self._run, self._backend)
        return self._engine

    def _read(self, engine: Engine) -> None:
        """Reads prompts until nothing more can start, or until as much was read as may be."""
        left = sys.maxsize if self._pace is None else self._pace.num_tokens(len(engine.rows))
        while left > 0:
            self._reading = self._reading or self._next_to_read()
            if self._reading is None:
                return
            call = self._reading
            try:
                left -= self._read_part(call, left, engine)
            except Exception as error:
                self._reading = None
                left -= call.call.num_tokens
                self._fail(call, error)

    def _next_to_read(self) -> PromptCall | None:
        """The first of those prompts that the scheduler wants to start and that fits."""
        sharing = self._waiting.sharing()
        if len(self._running) == self._max_rows or not sharing:
            return None
        assert self._backend is not None
        needs, limit = self._backend.kv.all_max_columns, self._backend.kv.max_tokens
        # All rows take the room of the longest one.
        taken = len(needs) * max(needs, default=0)
        room = sys.maxsize if limit is None else limit - taken
        chosen = self._scheduler.choose([call.max_columns for call in sharing], needs, room)
        if not needs and not chosen:
            chosen = [0]
        fitting = (i for i in chosen if self._backend.kv.fits([*needs, sharing[i].max_columns]))
        first = next(fitting, None)
        if first is None:
            return None
        self._waiting.start(sharing[first])
        return sharing[first]

    def _read_part(self, call: PromptCall, num_tokens: int, engine: Engine) -> int:
        """Reads on in a prompt, and starts its row at the end; returns how much was read."""
        request = call.request
        assert request is not None
        start, before = perf_counter(), request.reader.num_left
        is_nearly_all = before <= _SHORT_REST * num_tokens
        is_read = engine.admit(request, before if is_nearly_all else num_tokens) is not None
        num_read = before - request.reader.num_left
        if self._pace is not None:
            self._pace.observe_part(num_read, perf_counter() - start)
        if is_read:
            self._reading, self._running[call.index] = None, call
            if call.index in self._unread:
                engine.stop(call.index)
        return num_read

    def _drop(self, index: int) -> None:
        """Ends a row whose text nobody reads any more."""
        self._unread.add(index)
        if self._engine is not None:
            self._engine.stop(index)

    def _let_out(self, engine: Engine) -> None:
        """Rows that have ended leave the batch, and their answers are complete."""
        for row in engine.leave():
            call = self._running.pop(row.index)
            if call.request is not None:
                engine.record_outcome(call.request)
            if row.error is not None or row.index in self._unread:
                self._fail(call, row.error, row.new_ids)
                continue
            self._spec.finish(call.call, call.stats)
            self._answers.append(Answer.to(call, row.new_ids, self._tokenizer))

    def _fail(self, call: PromptCall, error: Exception | None, ids: Sequence[int] = ()) -> None:
        """Answers with an error and what was written before it, unless nobody waits for that."""
        self._spec.count(call.stats)
        if call.index in self._unread:
            self._unread.remove(call.index)
            return
        self._answers.append(Answer.to(call, list(ids), self._tokenizer, error))

    def _break_off(self, error: Exception) -> None:
        """Answers all rows with an error, after which nobody knows how much of a step was done.

        Without rows it is that of the next prompt, if the model could not be made ready for it. Our
        own errors are about the model then, and those of a scheduler about no prompt.
        """
        rows, first = self._engine.rows if self._engine else [], self._waiting.first
        if not self._running:
            if self._engine or first is None or isinstance(error, SelfSpecError):
                raise error
            self._waiting.start(first)
            self._running[first.index] = first
        written = {row.index: row.new_ids for row in rows}
        for index, call in self._running.items():
            self._fail(call, error, written.get(index, ()))
        self._running.clear()
        self._engine = self._backend = None

    def _answer_alone(self, call: PromptCall) -> None:
        self._engine = self._backend = None  # Its own KV takes the memory of the batch's.
        self._waiting.start(call)
        self.alone_reasons[str(call.alone_reason)] += 1
        ids: list[int] = []

        def hear(fresh: list[int]) -> bool:
            ids.extend(fresh)
            return self._hear is None or self._hear(call.index, fresh)

        self._is_alone = True
        try:
            found = call.decode_alone(hear)
            if found is not None:
                self._answers.append(Answer.to(call, found, self._tokenizer))
        except Exception as error:
            self._answers.append(Answer.to(call, ids, self._tokenizer, error))
        finally:
            self._is_alone = False

    def _check_fits(self, call: PromptCall, max_bytes: int) -> None:
        """Refuses a prompt that would not fit into the memory if it were the only one."""
        is_alone = call.alone_reason is not None
        if is_alone:
            cache = kv_of(call.call.model_kwargs)
            if not hasattr(cache, "layers") or foreign_layer(cache) is not None:
                return  # A recurrent or windowed state takes little room.
        if is_alone not in self._limits:
            self._limits[is_alone] = self._found_limits(max_bytes, is_alone=is_alone)
        most, most_read = self._limits[is_alone]
        if most is not None and call.max_columns > most:
            raise UnsupportedError(
                f"prompt, answer and drafts must fit into the {most} tokens of max_memory (got "
                f"{call.call.num_tokens} tokens in the prompt, {call.max_columns} with the answer "
                f"and drafts); {_FIX}"
            )
        if most_read is not None and call.call.num_tokens > most_read:
            raise UnsupportedError(
                f"a prompt must fit into the {most_read} tokens of max_memory in which prompts "
                f"are read (got {call.call.num_tokens}); {_FIX}"
            )

    def _found_limits(self, max_bytes: int, *, is_alone: bool) -> tuple[int | None, int | None]:
        """To find out what fits beside other rows takes a forward over one token."""
        if is_alone:
            most = max_bytes // kv_bytes(self._model, 1)
            return most, most
        self._ready()
        assert self._backend is not None
        return self._backend.kv.max_tokens, self._backend.kv.max_prompt


class _Listener:
    """A streamer that hands on the tokens of one row, and ends it where nobody reads them."""

    def __init__(self, hear: Hear, index: int, drop: Callable[[int], None]) -> None:
        self._hear, self._index, self._drop = hear, index, drop

    def put(self, value: torch.Tensor) -> None:
        """Takes one token."""
        if not self._hear(self._index, value.tolist()):
            self._drop(self._index)

    def end(self) -> None:
        """The answer says so."""

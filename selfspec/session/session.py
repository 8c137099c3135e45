"""`Session`: many prompts that come and go, written by one engine.

A prompt is read alone. Then its KV becomes one more row of the batch, and the steps of all rows
share their forwards. When a row ends, the next prompt takes its place. So a text is what
`generate()` gives for that prompt alone. A prompt that wants the batch empty, as one whose rows
depend on each other, gets an engine of its own.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch

from selfspec.ability.look import look_at
from selfspec.engine import Engine
from selfspec.errors import without_frames
from selfspec.prompt import Prompt
from selfspec.row import ReaderGone
from selfspec.row_rules import start_clocks
from selfspec.runner import ModelRunner
from selfspec.session.alone import decode_with_transformers, open_engine
from selfspec.session.line import ReadingPace, Scheduler, Waiting, WholePrompts
from selfspec.session.memory import SharedMemory

_LOOK_AHEAD = 256  # `num_wanted` lets this many prompts wait.
_SHORT_REST = 1.25  # If at most 1.25 parts of a prompt are left, they are read as one.


class Session:
    """Takes prompts and gives them back once their texts are complete; belongs to one thread.

    `max_memory` is what the keys and values may take, in bytes or as text such as ``"2GB"``, those
    of a prompt that is being read among them. Prompts wait in order of arrival, or in that of a
    `scheduler`. With a `pace` a long prompt is read in parts between steps.

    Prompts that begin alike are read once while one of them is written. With `keeps_kv`, what the
    running texts leave of `max_memory` keeps others that have ended, unless the knob says less.

    An error is the result of the prompt that it belongs to.
    """

    def __init__(
        self,
        runner: ModelRunner,
        spec: Any,
        *,
        max_rows: int = 8,
        max_memory: int | str | None = None,
        scheduler: Scheduler | None = None,
        pace: ReadingPace | None = None,
        keeps_kv: bool = False,
    ) -> None:
        self.alone_reasons: Counter[str] = Counter()  # Why texts were written alone.
        self.memory = SharedMemory(runner, max_rows, max_memory)
        self._runner = runner
        self._spec = spec
        self._pace = pace or WholePrompts()
        self._keeps_kv = keeps_kv or runner.config.kept_kv is not None
        self._waiting = Waiting(scheduler)
        self._reading: Prompt | None = None  # A place among the rows is kept for it.
        self._engine: Engine | None = None
        self._is_alone = False  # Is the engine for one prompt?
        self._opened = ExitStack()  # What the engine runs its forwards on.
        self._ended: list[Prompt] = []  # Counted at the end of a step,
        self._complete: list[Prompt] = []  # and then returned.

    @property
    def num_wanted(self) -> int:
        return _LOOK_AHEAD - len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many texts are being written, with the one whose prompt is being read."""
        return len(self._running) + (self._reading is not None)

    @property
    def _running(self) -> list[Prompt]:
        engine = self._engine  # Another thread may ask, while this one gives it up.
        return [] if engine is None else engine.prompts

    @property
    def is_empty(self) -> bool:
        """Is nothing left to do? Then other calls may use the model, whose KV was given up."""
        has_work = self._waiting or self.num_running or self._engine is not None
        return not (has_work or self._complete)

    @property
    def kv_bytes_in_use(self) -> int:
        """The memory that the keys and values of all rows fill."""
        engine = self._engine
        if engine is None:
            return 0
        num_tokens = sum(row.num_columns for row in engine.rows)
        return engine.backend.kv.column_bytes * num_tokens

    @property
    def kept_kv_bytes(self) -> int:
        """The memory that keys and values of texts take that have ended."""
        return self._runner.kept_kv_bytes

    def open(self) -> None:
        """Finds out what the model can verify and what fits, before a prompt waits for it."""
        if self._runner.support().mode == "tree":
            self._open_engine(None)
            self._close()

    def add(self, prompt: Prompt) -> None:
        """Lets a prompt wait; refuses what can never fit into the memory.

        Its index is that of no other prompt that waits or is written.
        """
        self.memory.check(prompt)
        self._waiting.add(prompt)

    def cancel(self, index: int) -> None:
        """Ends a text that nobody reads, within a step; does nothing if there is none."""
        self._waiting.leave(index)
        for prompt in (*self._running, self._reading):
            if prompt is None or prompt.index != index:
                continue
            if not prompt.result.rows:
                self._reading = None
                if self._engine is not None:
                    self._engine.reuse.left(prompt)
                self._spec.count(prompt)
            for row in prompt.result.rows:  # Some, if it is handing on its first tokens.
                row.fail(ReaderGone())

    def work(self) -> list[Prompt]:
        """Steps until a text is complete, or nothing is left to do."""
        ended: list[Prompt] = []
        while not ended and not self.is_empty:
            ended = self.step()
        return ended

    @torch.no_grad()
    def step(self) -> list[Prompt]:
        """Reads on in prompts for which there is a place, and lets all rows make one step.

        Returns the prompts whose texts are complete. One that can't share forwards has its turn
        when it is the first and no row runs. An error is the result of the prompt that it belongs
        to, or of all rows, if it may have left any of them in pieces. What prevents that the model
        is made ready is the result of the next prompt; for the one after it, that is tried anew.

        What is no `Exception`, such as an interrupt, is raised, and the prompts that it ended are
        dropped. Texts that were complete by then are returned by the next step.
        """
        try:
            self._go_on()
        except BaseException as error:
            self._break_off(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._settle()
        complete, self._complete = self._complete, []
        return complete

    def _go_on(self) -> None:
        if (engine := self._engine or self._open()) is not None:
            self._let_out(engine)
            if self._reading or self._waiting:
                self._read(engine)
                self._let_out(engine)
            if engine.prompts:
                start = perf_counter()
                with self._runner.decoding():
                    engine.step()
                self._pace.observe_step(perf_counter() - start)
                self._let_out(engine)
        if not self.num_running:
            self._close()

    def _open(self) -> Engine | None:
        """The engine for the rows to come; None where none are, or the next prompt needs none."""
        prompt = None if self._reading is not None else self._waiting.first
        if prompt is None or prompt.route.alone_reason is None:
            if self._reading or self._waiting:  # An error may have ended all but the one read.
                self._open_engine(None)
            return self._engine
        start = perf_counter()
        self._waiting.leave(prompt.index)
        self._reading = prompt
        self.alone_reasons[prompt.route.alone_reason] += 1
        start_clocks(prompt.stopping_criteria)
        if prompt.route.support.mode == "plain":
            decode_with_transformers(prompt)
            self._reading = None
            self._end(prompt, None)
        else:
            self._open_engine(prompt)
            prompt.stats.spend("prepare", perf_counter() - start)
        return self._engine

    def _open_engine(self, prompt: Prompt | None) -> None:
        """Takes what runs the forwards of one prompt, or of many that come and go."""
        limits = None if prompt is not None else self.memory.limits
        runner, spec, look = self._runner, self._spec, look_at(self._runner.model)
        opened = open_engine(runner, spec, prompt, look, limits=limits, keeps_kv=self._keeps_kv)
        self._engine, self._is_alone = self._opened.enter_context(opened), prompt is not None

    def _close(self) -> None:
        """Gives up the KV: others may use the model until the next row, and change its weights."""
        self._engine, self._is_alone = None, False
        self._opened.close()

    def _read(self, engine: Engine) -> None:
        """Reads prompts until no more can start, or until the pace wants the next step."""
        left = self._pace.num_tokens(len(engine.rows))
        while left > 0:
            if self._reading is None and not self._is_alone:
                running = [row.max_columns for row in engine.rows]
                self._reading = self._waiting.start_next(running, self.memory.limits)
            if (prompt := self._reading) is None:
                return
            try:
                left -= self._read_part(prompt, left, engine)
            except BaseException as error:  # An interrupt leaves its KV in pieces, too.
                self._reading = None
                left -= prompt.num_tokens
                self._end(prompt, error)
                if not isinstance(error, Exception):
                    raise

    def _read_part(self, prompt: Prompt, num_tokens: int, engine: Engine) -> int:
        """Reads on in a prompt, and starts its rows at the end; returns how much was read."""
        if self._keeps_kv and not prompt.result.read.num_columns:
            left = self.memory.left_beside(prompt, engine)
            if left is not None:  # Texts that have ended have it.
                engine.reuse.limit_to(left)
        start, before = perf_counter(), prompt.result.read.num_columns
        is_all = self._is_alone or prompt.num_tokens - before <= _SHORT_REST * num_tokens
        if engine.admit(prompt, None if is_all else num_tokens):
            self._reading = None
        so_far = prompt.result.read
        num_read = so_far.num_columns - max(before, so_far.num_kept)
        self._pace.observe_part(num_read, perf_counter() - start)
        return num_read

    def _let_out(self, engine: Engine) -> None:
        """Ends the prompts whose rows have all stopped, and lets rows out that have."""
        for prompt in engine.leave():
            self._end(prompt, prompt.result.rows[0].error)

    def _end(self, prompt: Prompt, error: BaseException | None) -> None:
        if self._engine is not None:
            self._engine.record_how_it_ran(prompt)
        prompt.result.error = error
        self._ended.append(prompt)

    def _break_off(self, error: BaseException) -> None:
        """Ends all rows that go on, of which nobody knows how much of a step was done.

        If there are none, it ends the prompt that was to be read. Else an error, other than an
        interrupt, prevents the end of the last prompt, or the start of the next one.
        """
        broken, prompt = list(self._running), self._reading
        if not broken:
            if prompt is None and isinstance(error, Exception):
                prompt = self._ended.pop() if self._ended else self._waiting.first
            if prompt is not None:
                self._waiting.leave(prompt.index)
                self._reading, broken = None, [prompt]
        for prompt in broken:
            is_whole = prompt.result.rows and all(row.is_done for row in prompt.result.rows)
            self._end(prompt, prompt.result.rows[0].error if is_whole else error)
        self._close()

    def _settle(self) -> None:
        """Counts the prompts that have ended, once others may use the model."""
        while self._ended:
            prompt = self._ended.pop(0)
            error, prompt.result.error = prompt.result.error, None
            if isinstance(error, Exception | None) and not isinstance(error, ReaderGone):
                self._complete.append(prompt)
            try:
                (self._spec.finish if error is None else self._spec.count)(prompt)
            except Exception as fault:
                error = fault if error is None else error
            if isinstance(error, Exception):
                prompt.result.error = without_frames(error)

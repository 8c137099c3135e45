"""The engine: draft, lay out, forward, verify, commit, learn, for rows that share forwards.

It knows requests, rows and how a model is run, and nothing of `generate()`, of packed weights or of
what a source looks at. A scripted model can drive it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeAlias

import numpy as np
import torch

from selfspec.ability.rope import changes_other_rows
from selfspec.compat.kernels import is_out_of_memory
from selfspec.cost import Budget, MeasuredBudget, Step, StepTime
from selfspec.cost.ledger import MeanRatio
from selfspec.draft.drafter import Drafter
from selfspec.draft.learned import Learned
from selfspec.draft.sources import RowStart
from selfspec.forward.backends import Backend
from selfspec.forward.columns import held_by
from selfspec.forward.model import num_readable, unplaced_id
from selfspec.forward.prompt import Prefilled, PromptReader
from selfspec.kept_kv import KeptKV, PromptEnd, Text
from selfspec.learning import tables, teach
from selfspec.machine.device import Device, Fetched, device_for
from selfspec.records import DraftTree, StepRecord
from selfspec.request import Request
from selfspec.row import Row, stream_to
from selfspec.runner import ModelRunner
from selfspec.verify.choosers import StepLogits
from selfspec.verify.logits import top_k
from selfspec.walks import Drafted, FirstTokens, first_tokens, read_logits, walked

Listener: TypeAlias = Callable[[StepRecord], None]
Committed: TypeAlias = tuple[Row, StepRecord]

_STEP = 4  # About the tokens of a row in a step, for what packing would save.
_RETRY = "retry"  # The stage of forwards that failed and were tried again over fewer rows.


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a forward shows besides the logits that rows read."""

    logits: StepLogits
    tops: Fetched | None  # The likeliest tokens at each node, on their way to the CPU.
    states: torch.Tensor | None  # (B, Q, D)


class Engine:
    """Decodes rows that share forwards: those of one call, or those of many that come and go.

    `admit` reads a request's prompt and lets its rows in, `step` runs one forward, and `leave` lets
    rows out that have stopped. Rows that move together are all of the batch, and none of them
    leaves before the last.
    """

    # Tables that learn a step late name fewer right tokens, as if steps took longer: by this share,
    # and by this one for each node.
    late_costs = (0.02, 0.001)

    def __init__(
        self,
        runner: ModelRunner,
        backend: Backend,
        *,
        learned: Callable[[int], Learned],  # For a vocabulary of some size.
        budget: Budget | None = None,  # None: what the config says.
        device: Device | None = None,
        listeners: Collection[Listener] = (),
        kept_kv: KeptKV | str | None = None,  # None: nothing is kept. Or why it can't be.
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        config = runner.config
        self.backend = backend
        self.config = config.changed(top_k=1) if backend.chains_only else config
        self.rows: list[Row] = []  # Those that still decode, in their order.
        self._runner = runner
        own = MeasuredBudget(ledger=runner.ledger) if config.budget == "measured" else Budget()
        self.budget = own if budget is None else budget
        self._run_as = ("", 0)
        # A source that belongs to the model looks at hidden states.
        self._model_sources = runner.sources(self.config.top_k) if backend.shows_states else []
        self._learned = learned
        self._device = Device() if device is None else device
        self._listeners = listeners
        self._kept_kv = kept_kv
        self._untaught: list[Committed] = []  # What sources and calibration are still to learn.
        self._taught = 0.0  # The seconds that this took the last time,
        self._gain = MeanRatio(0.0, weight=1.0)  # and those that a step gains if it is done late.
        self._num_readable = sys.maxsize  # The model reads smaller ids alone: no other is learned.
        self._clock = clock

    def begin(self, request: Request) -> None:
        """Lets a prompt go on after the longest beginning that was read for another text."""
        reader, stats, kept_kv = request.reader, request.stats, self._kept_kv
        if kept_kv is None or reader.has_begun:
            return
        stats.kept_reason = kept_kv if isinstance(kept_kv, str) else self._own_reason(reader)
        if isinstance(kept_kv, str) or stats.kept_reason is not None:
            return
        ids = np.array(reader.input_ids[0].tolist())
        running = [self._text_of(row) for row in self.rows if row.prompt_end is not None]
        beginning = kept_kv.beginning(ids, request.scope, reader.cache, running)
        if beginning is not None:
            reader.begin(beginning)
            stats.num_prompt_tokens_kept += beginning.num_columns

    def limit_kept_kv(self, num_bytes: int) -> None:
        """Lets what is kept of texts that have ended take this much memory at most."""
        if isinstance(self._kept_kv, KeptKV):
            self._kept_kv.limit_to(num_bytes)

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        """Where memory runs out inside, what is kept of texts that have ended is dropped."""
        try:
            yield
        except Exception as error:
            if isinstance(self._kept_kv, KeptKV) and is_out_of_memory(error):
                self._kept_kv.drop()
            raise

    def _own_reason(self, reader: PromptReader) -> str | None:
        """Why what was read for other texts is of no use for a prompt."""
        if changes_other_rows(self._runner.model.config, reader.arguments):
            return "it is so long that its rotary embedding has changed"
        return reader.own_reason()

    def _text_of(self, row: Row) -> Text:
        """The tokens of a row whose keys and values are there, and these."""
        ids = np.array((row.prompt_ids + row.new_ids)[: self.backend.num_columns(row.kv)])
        return Text(ids, row.prompt_end, partial(self.backend.held, row.kv))

    def _keep_kv(self, row: Row) -> None:
        """Keeps what a row that ended well has read."""
        if isinstance(self._kept_kv, KeptKV) and row.prompt_end is not None and row.error is None:
            text = self._text_of(row)
            self._kept_kv.keep(text.ids, text.end, text.held)

    def admit(self, request: Request, num_tokens: int | None = None) -> object | None:
        """Reads the prompt of a request, to its end or `num_tokens` more of it.

        At the end its rows get their first tokens, which a streamer hears before anything is
        learned, and take part in the steps to come. Returns its KV cache then, and None before. An
        error leaves the rows of other requests as they were.
        """
        runner, reader, stats = self._runner, request.reader, request.stats
        num_others, start = len(self.rows), self._clock()
        num_read = reader.num_left if num_tokens is None else min(reader.num_left, num_tokens)
        runner.before_forward(reader.num_rows * max(num_read, 1))
        read_from = self._clock()
        stats.spend("prepare", read_from - start)
        with self._giving_way(), runner.reading():
            prompt = reader.read(num_tokens, num_states=self._num_states(reader.num_rows))
            stats.spend("prefill", self._clock() - read_from)
            if prompt is None:
                return None
            try:
                self._join(request, prompt)
            except Exception:
                if request.fails_alone:
                    self._keep(list(range(num_others)))
                raise
        kv: object = prompt.cache
        return kv

    def _num_states(self, num_more: int) -> int:
        """How many of a prompt's last hidden states the model's own sources learn from."""
        num_rows = len(self.rows) + num_more
        return max((source.num_states(num_rows) for source in self._model_sources), default=0)

    def _join(self, request: Request, prompt: Prefilled) -> None:
        """Lets the rows of a request in whose prompt was read."""
        model, stats = self._runner.model, request.stats
        # What was learned on another vocabulary is refused before anybody gets a token.
        learned = self._learned(prompt.logits.shape[-1]).for_request(self.config.learning)
        self._device, self._num_readable = device_for(prompt.logits.device), num_readable(model)
        rows = self._new_rows(request, prompt, learned)
        if isinstance(self._kept_kv, KeptKV) and stats.kept_reason is None:
            (row,) = rows
            row.prompt_end = PromptEnd(len(row.prompt_ids), prompt.logits, request.scope)
            if (held := held_by(prompt.cache)).states:  # Soon they are those of a longer text.
                self._kept_kv.keep(np.array(row.prompt_ids), row.prompt_end, held)
        first = first_tokens(rows, prompt.logits, self._device)
        start = self._clock()
        if learned.learns:
            teach(learned, prompt, model.get_output_embeddings(), self._num_readable)
        stats.table_bytes = learned.nbytes
        stats.spend("learn", self._clock() - start)
        held = self.backend.admit(
            prompt,
            [row.kv for row in self.rows],
            max_new_columns=request.max_new_columns,
            max_tree=request.max_tree,
        )
        for row, kv in zip(rows, held, strict=True):
            row.kv = kv
        self.add(rows, first)

    def _new_rows(self, request: Request, prompt: Prefilled, learned: Learned) -> list[Row]:
        """The rows of a prompt that was read, each with what it drafts from."""
        readable, banned = self._num_readable, unplaced_id(self._runner.model)
        new, rows = request.new_rows, []
        for number, (new_row, ids) in enumerate(zip(new, prompt.texts, strict=True)):
            start = RowStart(
                prompt_ids=[*request.encoder_texts[number], *ids],
                max_new_tokens=request.max_new_columns,
                budget=self.budget,
                count_forward=request.stats.count_draft_forward,
                num_rows=len(self.rows) + len(new),
                states=None if prompt.hidden is None else prompt.hidden[number],
            )
            sources = (*self._model_sources, *request.sources[number])
            drafter = Drafter(
                learned, start, self.config, sources, num_readable=readable, banned=banned
            )
            rows.append(new_row(prompt_ids=ids, drafter=drafter))
        if request.streamer is not None:
            stream_to(request.streamer, rows)
        return rows

    def add(self, rows: list[Row], first: FirstTokens) -> None:
        """Lets in rows that have their first token, and learns from it."""
        laps = Laps(self._clock)
        self.rows += rows
        tops = self._fetch_tops(first.logits.logits)
        committed = self._learn(rows, first.records, _Seen(first.logits, tops, None))
        self._teach()
        laps.end("learn")
        for row in rows:
            row.stats.count_first(laps.seconds, len(rows))
        self._call_listeners(committed)

    def run(self) -> None:
        """Steps until every row has stopped."""
        with self._runner.decoding():
            while not all(row.is_done for row in self.rows):
                self.leave()
                self._step()
        self._teach()
        for row in self.rows:
            self._keep_kv(row)

    def step(self) -> None:
        """One forward and all that belongs to it."""
        with self._runner.decoding():
            self._step()

    def _step(self) -> None:
        laps, backend = Laps(self._clock), self.backend
        self._runner.before_forward(_STEP * len(self.rows))
        start = laps.end("prepare")
        budget = self._told_budget()
        self._prepare(budget)
        prepared = laps.end("draft")
        pending, allowed = backend.num_pending, backend.max_width(self.config.max_nodes)
        step = budget.step(allowed, pending)
        trees = self._draft(step)
        drafted = laps.end("draft")
        committed = self._verified(list(zip(self.rows, trees, strict=True)), laps)
        is_late = self._device.works_beside and self._gain.value > 0
        if not is_late:
            self._teach()
        done = laps.end("learn")
        width = (pending or 0) + max(map(len, trees))
        took = StepTime(width, drafted - prepared, done - drafted - backend.setting_up)
        self._runner.count_step(backend, took.rest)
        if _RETRY not in laps.seconds:
            step.observe(took, [record for _, record in committed])
            # While the device is waited for, there is time to learn.
            hidden = min(self._taught, laps.seconds["verify"] + is_late * self._taught)
            always, for_each = self.late_costs
            costs = (always + for_each * width) * (took.drafting + took.rest)
            self._gain.observe(hidden - costs, 1.0)
        done = laps.end("learn")
        for row, record in committed:
            row.stats.count_step(record)
            row.stats.num_read_again += pending or 0
            row.stats.count_time(laps.seconds, done - start, width, len(committed))
        self._call_listeners(committed)

    def _told_budget(self) -> Budget:
        """The budget, which knows how the next step is run."""
        run_as = (self.backend.kind, len(self.rows))
        if run_as != self._run_as:
            self._run_as = run_as
            self.budget.run_as(*run_as, self._runner.curve(self.backend, len(self.rows)))
        return self.budget

    def _prepare(self, budget: Budget) -> None:
        """Lets sources decide for all rows, and cursors begin that take time."""
        for source in self._model_sources:
            source.before_step(len(self.rows), budget)
        for row in self.rows:
            with row.guarded():
                if row.max_nodes > 1:
                    row.drafter.prepare()

    def _verified(self, drafted: list[Drafted], laps: Laps) -> list[Committed]:
        """One forward over the trees of some rows, and what comes of it, without rows that failed.

        If the forward fails, each half of the rows is tried again, so that no row fails but one
        that fails alone. Nothing was drawn or committed by then.
        """
        rows, half = [row for row, _ in drafted], len(drafted) // 2
        try:
            with self._giving_way():
                seen = self._looked_at(rows, [tree for _, tree in drafted], laps)
        except Exception as error:
            if not rows[0].fails_alone:
                raise
            laps.end(_RETRY)
            if not half:
                rows[0].fail(error)
        else:
            return self._committed(drafted, seen, laps)
        committed = []  # The error has let go of the memory of the forward by now.
        for part in (slice(0, half), slice(half, None)) if half else ():
            committed += self._verified(drafted[part], laps)
        return committed

    def _looked_at(self, rows: list[Row], trees: list[DraftTree], laps: Laps) -> _Seen:
        """Runs the forward, lets the rows read its logits, and fetches what is to be learned."""
        layout = self.backend.lay_out([row.kv for row in rows], trees)
        laps.end("layout")
        wanted = any(row.drafter.wants_states for row in rows)
        logits, states = self.backend.forward(layout, with_states=wanted)
        laps.end("forward")
        # The device is asked first for what the walk needs, then for the tables.
        read = read_logits(rows, logits, self._device)
        laps.end("verify")
        tops = self._fetch_tops(read.logits)
        self._teach()
        laps.end("learn")
        return _Seen(read, tops, states)

    def _committed(self, drafted: list[Drafted], seen: _Seen, laps: Laps) -> list[Committed]:
        """Lets the rows walk down their trees, keeps the KV of their paths, and learns."""
        records = walked(drafted, seen.logits)
        laps.end("verify")
        self.backend.commit([[] if record is None else record.path for record in records])
        self.backend.wipe([index for index, (row, _) in enumerate(drafted) if row.is_spoiled])
        laps.end("commit")
        return self._learn([row for row, _ in drafted], records, seen)

    def leave(self) -> list[Row]:
        """Rows that walk alone leave the batch when they stop; those that move together stay.

        Returns the rows that left. The last rows move into their places, so that few are moved.
        """
        done = [row.is_done and not row.chooser.moves_together for row in self.rows]
        if not any(done):
            return []
        left = [row for row, has_left in zip(self.rows, done, strict=True) if has_left]
        for row in left:
            self._keep_kv(row)
        self._keep(_without_gaps(done))
        if not self.rows:
            self._teach()
        return left

    def _keep(self, live: list[int]) -> None:
        self.rows = [self.rows[i] for i in live]
        if self.backend.kv is not None:
            self.backend.kv.keep_rows([row.kv for row in self.rows])

    def _draft(self, step: Step) -> list[DraftTree]:
        """A tree for each row.

        A row that only waits for the others gets the pads that are sure to come.
        """
        trees = []
        for row in self.rows:
            tree = DraftTree.of_root(row.last_token)
            with row.guarded():
                most = min(step.max_nodes, row.most_nodes)
                limits = (most, row.max_depth, step.search())
                tree = row.drafter.draft(row.last_token, *limits)
            trees.append(tree)
        step.fit(trees)
        _add_pads(self.rows, trees)
        return trees

    def _fetch_tops(self, logits: torch.Tensor) -> Fetched | None:
        """The tables to learn from; None where nobody learns."""
        config = self._runner.config
        if config.learning == "frozen":
            return None
        return self._device.fetch(*top_k(logits[..., : self._num_readable], config.top_k))

    def _learn(
        self, rows: list[Row], records: Sequence[StepRecord | None], seen: _Seen
    ) -> list[Committed]:
        tops, committed = None if seen.tops is None else tables(*seen.tops.get()), []
        for index, (row, record) in enumerate(zip(rows, records, strict=True)):
            if record is None:
                continue
            committed.append((row, record))
            if record.path:
                if tops is not None:
                    record.top = tops.at((index, slice(len(record.tree))))
                if seen.states is not None:
                    record.states = seen.states[index]
                with row.guarded():
                    row.drafter.observe(record)
        self._untaught += [each for each in committed if each[0].drafter.learned.learns]
        return committed

    def _teach(self) -> None:
        """Lets the calibration and the tables learn from the last step, if they have not yet.

        Rows that share them do so in one write. It is done late, while the device computes the next
        step, where that saves more time than it costs tokens.
        """
        if not self._untaught:
            return
        start = self._clock()
        sharing: dict[int, list[Committed]] = {}
        untaught, self._untaught = self._untaught, []
        for row, record in untaught:
            calibration = row.drafter.learned.calibration
            with row.guarded():
                calibration.observe(record)
            sharing.setdefault(id(calibration), []).append((row, record))
        for lessons in sharing.values():
            row = lessons[0][0]
            with row.guarded():
                row.drafter.learned.observe_steps([record for _, record in lessons])
        self._taught = self._clock() - start

    def _call_listeners(self, committed: list[Committed]) -> None:
        for listener in tuple(self._listeners):  # One may be added or taken out meanwhile.
            for row, record in committed:
                with row.guarded():
                    if record.path:
                        listener(record)

    def record_outcome(self, request: Request) -> None:
        """Writes into its statistics how a request that is over, or broke off, was decoded."""
        stats = request.stats
        stats.mode = "chain" if self.backend.chains_only else "tree"
        stats.forward = self.backend.kind
        stats.packed_bytes = self._runner.packed_bytes
        stats.captured_bytes = self._runner.captured_bytes
        stats.eager_reason = self.backend.reason or self._runner.reason
        stats.heads_reason = self._runner.why_no_heads(self.backend)
        stats.paused = self.budget.paused(stats.num_plain_steps, stats.num_steps)


class Laps:
    """The seconds of a step by its stages, from the end of one stage to the end of the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self.start = self._last = clock()

    def end(self, stage: str) -> float:
        """Adds the time since the last end to a stage; returns the time now."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
        return now


def _add_pads(rows: list[Row], trees: list[DraftTree]) -> None:
    """Makes the trees of rows that are padded chains of pads, as deep as the deepest of all."""
    padded = [(row, tree) for row, tree in zip(rows, trees, strict=True) if row.is_padded]
    deepest = max(max(tree.depths) for tree in trees) if padded else 0
    for row, tree in padded:
        for node in range(deepest):
            tree.add(node, row.pad_token_id, 1.0)


def _without_gaps(gaps: list[bool]) -> list[int]:
    """The indices that are no gaps, the last ones moved into the gaps.

    >>> _without_gaps([False, True, False, False])
    [0, 3, 2]
    """
    kept = [index for index, is_gap in enumerate(gaps) if not is_gap]
    last = [index for index in kept if index >= len(kept)]
    return [last.pop() if gaps[index] else index for index in range(len(kept))]

"""The engine: draft, lay out, forward, verify, commit, learn, for rows that share forwards.

It knows prompts, rows and how a model is run, and nothing of who waits, of packed weights or of
what a source looks at. A scripted model can drive it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch

from selfspec.ability.families import unplaced_id
from selfspec.cost import Budget, MeasuredBudget, Step, StepTime
from selfspec.draft.drafter import Drafter
from selfspec.draft.learned import Learned
from selfspec.draft.sources import RowStart
from selfspec.forward.backends import Backend
from selfspec.forward.costs import context_bucket
from selfspec.forward.model import num_readable
from selfspec.forward.prompt import Prefilled
from selfspec.kept_kv import KeptKV
from selfspec.learning import Committed, tables, teach, teach_steps
from selfspec.machine.device import CPU, Device, Fetched, device_for
from selfspec.prompt import Prompt
from selfspec.records import DraftTree, StepRecord
from selfspec.row import Row, stream_to
from selfspec.runner import ModelRunner
from selfspec.sharing import Sharing
from selfspec.verify.choosers import StepLogits
from selfspec.verify.logits import top_k
from selfspec.walks import Drafted, FirstTokens, first_tokens, read_logits, walked

Listener: TypeAlias = Callable[[StepRecord], None]

_STEP = 4  # About the tokens of a row in a step, for what packing would save.
_RETRY = "retry"  # The stage of forwards that failed and were tried again over fewer rows.


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a forward shows besides the logits that rows read."""

    logits: StepLogits
    tops: Fetched | None  # The likeliest tokens at each node, on their way to the CPU.
    states: torch.Tensor | None  # (B, Q, D)


class _Drafts(NamedTuple):
    """A tree for each row, and what drafting them took."""

    step: Step
    trees: list[Drafted]
    width: int  # of the forward
    seconds: float


class Engine:
    """Decodes rows that share forwards: those of one call, or those of many that come and go.

    `admit` reads a prompt and lets its rows in, `step` runs one forward, and `leave` lets
    rows out that have stopped. Rows that move together are all of the batch, and none of them
    leaves before the last.
    """

    def __init__(
        self,
        runner: ModelRunner,
        backend: Backend,
        *,
        learned: Callable[[int], Learned],  # For a vocabulary of some size.
        budget: Budget | None = None,  # None: what the config says.
        device: Device = CPU,  # until the first prompt shows another one
        listeners: Collection[Listener] = (),
        kept_kv: KeptKV | str | None = None,  # None: nothing is shared. Or why it can't be.
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        config = runner.config
        self.backend = backend
        self.config = config.changed(top_k=1) if backend.chains_only else config
        self.rows: list[Row] = []  # Those that still decode, in their order.
        self._runner = runner
        own = MeasuredBudget(ledger=runner.ledger) if config.budget == "measured" else Budget()
        self.budget = own if budget is None else budget
        self._run_as = ("", 0, (0, 0))
        # A source that belongs to the model looks at hidden states.
        self._model_sources = runner.sources(self.config.top_k) if backend.shows_states else []
        self._learned = learned
        self._device = device
        self._listeners = listeners
        self.sharing = Sharing(kept_kv, backend)
        self._num_readable = sys.maxsize  # The model reads smaller ids alone: no other is learned.
        self._clock = clock

    def admit(self, prompt: Prompt, num_tokens: int | None = None) -> bool:
        """Reads a prompt, to its end or `num_tokens` more of it; was it read to its end?

        At the end its rows get their first tokens, which a streamer hears before anything is
        learned, and take part in the steps to come. An error leaves the rows of others as they
        were.
        """
        runner, reader, stats = self._runner, prompt.reader, prompt.stats
        num_others, num_new, start = len(self.rows), len(prompt.input_ids), self._clock()
        num_rows = num_others + num_new
        num_read = reader.num_left if num_tokens is None else min(reader.num_left, num_tokens)
        runner.before_forward(num_new * max(num_read, 1))
        read_from = self._clock()
        stats.spend("prepare", read_from - start)
        with runner.reading():
            # The model's own sources learn from a prompt's last hidden states.
            wanted = [source.num_states(num_rows) for source in self._model_sources]
            prefilled = self.sharing.read(prompt, num_tokens, max(wanted, default=0))
            stats.spend("prefill", self._clock() - read_from)
            if prefilled is None:
                return False
            try:
                self._join(prompt, prefilled)
            except Exception:
                if prompt.fails_alone:
                    self._keep(list(range(num_others)))
                raise
        prompt.kv = prefilled.cache
        return True

    def _join(self, prompt: Prompt, prefilled: Prefilled) -> None:
        """Lets the rows of a prompt in that was read."""
        model, stats = self._runner.model, prompt.stats
        # What was learned on another vocabulary is refused before anybody gets a token.
        learned = self._learned(prefilled.logits.shape[-1]).for_request(self.config.learning)
        self._device, self._num_readable = device_for(prefilled.logits.device), num_readable(model)
        rows = self._new_rows(prompt, prefilled, learned)
        self.sharing.joined(prompt, prefilled)
        first = first_tokens(rows, prefilled.logits, self._device)
        start = self._clock()
        if learned.learns:
            teach(learned, prefilled, model.get_output_embeddings(), self._num_readable)
        stats.table_bytes = learned.nbytes
        stats.spend("learn", self._clock() - start)
        admit = partial(
            self.backend.admit,
            prefilled,
            rows,
            self.rows,
            max_new_columns=prompt.max_new_columns,
            max_tree=prompt.config.max_nodes,
        )
        self.sharing.with_memory(admit)
        self.add(rows, first)

    def _new_rows(self, prompt: Prompt, prefilled: Prefilled, learned: Learned) -> list[Row]:
        """The rows of a prompt that was read, each with what it drafts from."""
        readable, banned = self._num_readable, unplaced_id(self._runner.model)
        for number, ids in enumerate(prefilled.texts):
            start = RowStart(
                prompt_ids=[*prompt.encoder_texts[number], *ids],
                max_new_tokens=prompt.max_new_columns,
                budget=self.budget,
                count_forward=prompt.stats.count_draft_forward,
                num_rows=len(self.rows) + len(prefilled.texts),
                states=None if prefilled.hidden is None else prefilled.hidden[number],
            )
            sources = (*self._model_sources, *prompt.sources[number])
            drafter = Drafter(
                learned, start, self.config, sources, num_readable=readable, banned=banned
            )
            prompt.add_row(ids, drafter)
        if prompt.streamer is not None:
            stream_to(prompt.streamer, prompt.rows)
        return prompt.rows

    def add(self, rows: list[Row], first: FirstTokens) -> None:
        """Lets in rows that have their first token, and learns from it."""
        laps = Laps(self._clock)
        self.rows += rows
        tops = self._fetch_tops(first.logits.logits)
        committed = self._observed(rows, first.records, _Seen(first.logits, tops, None))
        teach_steps(committed)
        laps.end("learn")
        for row in rows:
            row.stats.count_first(laps.seconds, len(rows))
        self._call_listeners(committed)

    def step(self) -> None:
        """One forward over a tree for each row, and all that belongs to it.

        Whoever calls it has entered `ModelRunner.decoding`.
        """
        laps = Laps(self._clock)
        self._runner.before_forward(_STEP * len(self.rows))
        laps.end("prepare")
        drafts = self._draft(laps)
        committed = self._verify(drafts.trees, laps)
        teach_steps(committed)
        self._account(drafts, committed, laps)
        self._call_listeners(committed)

    def _draft(self, laps: Laps) -> _Drafts:
        """A tree for each row, once sources and cursors that take time had theirs."""
        backend, num_rows, trees = self.backend, len(self.rows), list[DraftTree]()
        if (run_as := (backend.kind, num_rows, context_bucket(backend.front))) != self._run_as:
            self._run_as = run_as
            self.budget.run_as(backend.kind, num_rows, self._runner.curve(backend, num_rows))
        for source in self._model_sources:
            source.before_step(num_rows, self.budget)
        for row in self.rows:
            with row.guarded():
                if row.max_nodes > 1:
                    row.drafter.prepare()
        start = laps.end("draft")
        step = self.budget.step(backend.max_width(self.config.max_nodes))
        for row in self.rows:
            tree = DraftTree.of_root(row.last_token)
            with row.guarded():
                limits = (min(step.max_nodes, row.most_nodes), row.max_depth, step.search())
                tree = row.drafter.draft(row.last_token, *limits)
            trees.append(tree)
        step.fit(trees)
        _add_pads(self.rows, trees)
        drafted = list(zip(self.rows, trees, strict=True))
        return _Drafts(step, drafted, max(map(len, trees)), laps.end("draft") - start)

    def _verify(self, drafted: list[Drafted], laps: Laps) -> list[Committed]:
        """Lets the rows walk down their trees, and keeps the KV of their paths.

        Rows that have failed are left out.
        """
        committed = []
        for part, seen in self._forwards(drafted, laps):
            records = walked(part, seen.logits)
            laps.end("verify")
            self.backend.commit([[] if record is None else record.path for record in records])
            self.backend.wipe([index for index, (row, _) in enumerate(part) if row.is_spoiled])
            laps.end("commit")
            committed += self._observed([row for row, _ in part], records, seen)
        laps.end("learn")
        return committed

    def _forwards(
        self, drafted: list[Drafted], laps: Laps
    ) -> Iterator[tuple[list[Drafted], _Seen]]:
        """What a forward over the trees shows, or one over each half of them where it fails.

        So no row fails but one that fails alone. Nothing of a part is drawn or committed before its
        forward has succeeded.
        """
        left = [drafted]
        while left:
            part, seen = left.pop(), None
            try:
                seen = self.sharing.with_memory(partial(self._forward, part, laps))
            except Exception as error:
                if not part[0][0].fails_alone:
                    raise
                laps.end(_RETRY)
                if len(part) == 1:
                    part[0][0].fail(error)
            if seen is not None:
                yield part, seen
            elif len(part) > 1:  # The error has let go of the memory of the forward by now.
                half = len(part) // 2
                left += [part[half:], part[:half]]

    def _forward(self, drafted: list[Drafted], laps: Laps) -> _Seen:
        """Runs a forward, lets the rows read its logits, and fetches what is to be learned."""
        rows, trees = [row for row, _ in drafted], [tree for _, tree in drafted]
        layout = self.backend.lay_out(rows, trees)
        laps.end("layout")
        wanted = any(row.drafter.wants_states for row in rows)
        logits, states = self.backend.forward(layout, with_states=wanted)
        laps.end("forward")
        # The device is asked first for what the walk needs, then for the tables.
        read = read_logits(rows, logits, self._device)
        laps.end("verify")
        seen = _Seen(read, self._fetch_tops(read.logits), states)
        laps.end("learn")
        return seen

    def _account(self, drafts: _Drafts, committed: list[Committed], laps: Laps) -> None:
        """Tells the budget what the step took and brought, and counts it for each row."""
        took = laps.end("learn") - laps.start - laps.seconds["prepare"]
        rest = took - laps.seconds["draft"] - self.backend.setting_up
        self._runner.count_step(self.backend, rest)
        if _RETRY not in laps.seconds:
            time = StepTime(drafts.width, drafts.seconds, rest)
            drafts.step.observe(time, [record for _, record in committed])
        took = laps.end("learn") - laps.start - laps.seconds["prepare"]
        for row, record in committed:
            row.stats.count_step(record)
            row.stats.count_time(laps.seconds, took, drafts.width, len(committed))

    def leave(self) -> list[Row]:
        """Rows that walk alone leave the batch when they stop; those that move together stay.

        Returns the rows that left. The last rows move into their places, so that few are moved.
        """
        done = [row.is_done and not row.chooser.moves_together for row in self.rows]
        if not any(done):
            return []
        left = [row for row, has_left in zip(self.rows, done, strict=True) if has_left]
        self.sharing.ended(left)
        self._keep(_without_gaps(done))
        return left

    def _keep(self, live: list[int]) -> None:
        self.rows = [self.rows[i] for i in live]
        if self.backend.kv is not None:
            self.backend.kv.keep_rows(self.rows)

    def _fetch_tops(self, logits: torch.Tensor) -> Fetched | None:
        """The tables to learn from; None where nobody learns."""
        config = self._runner.config
        if config.learning == "frozen":
            return None
        return self._device.fetch(*top_k(logits[..., : self._num_readable], config.top_k))

    def _observed(
        self, rows: list[Row], records: Sequence[StepRecord | None], seen: _Seen
    ) -> list[Committed]:
        """Tells each row's cursors what came of its tree; waits for tables if it learns."""
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
        return committed

    def _call_listeners(self, committed: list[Committed]) -> None:
        for listener in tuple(self._listeners):  # One may be added or taken out meanwhile.
            for row, record in committed:
                with row.guarded():
                    if record.path:
                        listener(record)

    def record_outcome(self, prompt: Prompt) -> None:
        """Writes into its statistics how a prompt that is over, or broke off, was decoded."""
        stats = prompt.stats
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

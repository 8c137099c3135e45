"""The engine: draft, lay out, forward, verify, commit, learn, for rows that share forwards.

Everything outside is a callable or a protocol: the forward, the logits processors, the stopping
criteria. So a scripted model can drive it, and no word of transformers is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from selfspec.config import SpecConfig
from selfspec.cost import Budget, FixedBudget, MeasuredBudget, Step, StepTime
from selfspec.draft.learned import Learned
from selfspec.draft.sources.draft_chain import DraftModelCursor
from selfspec.draft.sources.map_cursor import MapCursor
from selfspec.forward.backends import Backend
from selfspec.forward.model import head_heard, num_readable
from selfspec.forward.prompt import Prefilled, PromptReader
from selfspec.learning import tables, teach
from selfspec.machine.device import Device, Fetched, PlainDevice, device_for
from selfspec.neural.hidden_map import HiddenMap, MapWeights
from selfspec.neural.map_prior import MapPrior
from selfspec.neural.small_model import DraftText
from selfspec.records import MAP, DraftTree, StepRecord
from selfspec.row import Row
from selfspec.runner import Run
from selfspec.verify.choosers import StepLogits
from selfspec.verify.logits import fits_at_once, in_float32, top_k
from selfspec.verify.walk import walk

__all__ = ["Engine", "FirstTokens", "first_tokens"]

Listener = Callable[[StepRecord], None]

_MOST_MAPS = 4  # Rows with a map of hidden states; each takes up to 60 MB with 2,048 dimensions.


class FirstTokens(NamedTuple):
    """What the prompt's forward committed to each row."""

    records: list[StepRecord]
    logits: torch.Tensor  # (B, 1, V): those that the tokens were chosen from


class Engine:
    """Decodes rows that share forwards: those of one call, or those of many that come and go.

    `admit` reads a call's prompt and lets its rows in, `step` runs one forward, and `leave` lets
    rows out that have stopped. Rows that move together are all of the batch, and none of them
    leaves before the last.
    """

    def __init__(
        self,
        backend: Backend,
        config: SpecConfig,
        *,
        run: Run | None = None,  # How the model is run; None if no call will be admitted.
        learned: Callable[[int], Learned] | None = None,  # For a vocabulary of some size.
        budget: Budget | None = None,  # None: what the config says.
        device: Device | None = None,
        listeners: Collection[Listener] = (),
        num_readable: int = sys.maxsize,  # Other ids can't be drafted and are not worth learning.
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.backend = backend
        self.config = config.changed(top_k=1) if backend.chains_only else config
        self.rows: list[Row] = []  # Those that still decode, in their order.
        self.budget = budget
        self._run = run
        self._learned = learned
        self._device = PlainDevice() if device is None else device
        self._listeners = listeners
        self._num_readable = num_readable
        self._clock = clock
        self._way = "", 0  # How the last step was run, and its rows.
        self._is_settled = run is None  # Will no more weights be packed?

    def admit(self, call: Any, num_tokens: int | None = None) -> Prefilled | None:
        """Reads the prompt of a `Call`, to its end or `num_tokens` more of it.

        At the end its rows get their first tokens, which a streamer hears before anything is
        learned, and take part in the steps to come. Returns None before the end.
        """
        run, seconds = self._run, call.stats.seconds
        reader: PromptReader = call.reader
        assert run is not None
        start = self._clock()
        left = reader.num_left
        num_read = left if num_tokens is None else min(left, num_tokens)
        run.before_prompt(len(call.input_ids) * max(num_read, 1))
        read_from = self._clock()
        seconds["prepare"] += read_from - start
        with run.reading():
            prompt = reader.read(num_tokens)
            seconds["prefill"] += self._clock() - read_from
            if prompt is not None:
                self._join(call, prompt)
        return prompt

    def _join(self, call: Any, prompt: Prefilled) -> None:
        """Lets the rows of a call in whose prompt was read."""
        assert self._learned is not None
        # What was learned on another vocabulary is refused before anybody gets a token.
        learned = self._learned(prompt.logits.shape[-1])
        rows = call.rows(prompt)
        self._device = device_for(prompt.logits.device, overlap=self.config.overlap)
        first = first_tokens(rows, prompt.logits, self._device)
        start = self._clock()
        learned = learned.for_request(self.config.learning)
        self._num_readable = num_readable(call.model)
        if learned.learns:
            teach(learned, prompt, call.model.get_output_embeddings(), self._num_readable)
        call.stats.table_bytes = learned.nbytes
        call.stats.seconds["learn"] += self._clock() - start
        self.backend.admit(prompt, reach=call.reach, width=call.width)
        budget = self._budget_for(len(self.rows) + len(rows))
        start = self._clock()
        prior = learned.map_prior
        maps = self._maps(call, prompt, budget, prior) if learned.learns else [None] * len(rows)
        call.stats.seconds["learn"] += self._clock() - start
        given = zip(rows, call.predictions, call.grammars(), maps, strict=True)
        for row, prediction, grammar, state_map in given:
            cursor = None
            if call.draft_model is not None:
                text = DraftText(call.draft_model)
                cursor = DraftModelCursor(text, row.prompt_ids, budget.worth, call.reach)
            others = (prediction, cursor, grammar, state_map)
            row.begin(learned, self.config, *others, self._num_readable)
        self.add(rows, first)

    def _maps(
        self, call: Any, prompt: Prefilled, budget: Budget, known: Mapping[str, Any] | None
    ) -> list[MapCursor | None]:
        """A map of hidden states for each row; None for all where there can be none.

        Maps of many rows would take more time than they save.
        """
        run, hidden, texts = self._run, prompt.hidden, prompt.texts
        weights, num_rows = None, len(self.rows) + len(texts)
        if MAP in self.config.sources and num_rows <= _MOST_MAPS:
            weights = MapWeights.of(call.model)
        if run is None or weights is None or self.backend.kind == "graph":
            return [None] * len(texts)
        if hidden is None:
            hidden = torch.empty(len(texts), 0, weights.head.shape[1], device="cpu")
        prior = MapPrior.of(known, weights.embeddings, weights.head.shape[1])

        def price(seconds: float) -> float:
            return budget.worth(seconds * num_rows)

        return [
            MapCursor(
                HiddenMap(weights, ids, states, prior), self.config.top_k, run.map_worth, price
            )
            for ids, states in zip(texts, hidden, strict=True)
        ]

    def _budget_for(self, num_rows: int) -> Budget:
        """The budget, which is opened with the first rows."""
        if self.budget is None and self._run is not None and self.config.budget == "measured":
            curve = self._run.curve(self.backend, num_rows)
            self.budget = MeasuredBudget(curve, self._run.ledger)
            self._way = self.backend.kind, num_rows
        if self.budget is None:
            self.budget = FixedBudget()
        return self.budget

    def add(self, rows: list[Row], first: FirstTokens) -> None:
        """Lets in rows that have their first token, and learns from it."""
        laps = Laps(self._clock)
        self.rows += rows
        tops = self._fetch_tops(first.logits, rows[0].learned)
        self._device.join()
        self._learn(rows, first.records, tops)
        laps.end("learn")
        for row in rows:
            row.stats.count_first(laps.seconds, len(rows))
        self._tell(first.records)

    def run(self) -> None:
        """Steps until every row has stopped."""
        rows = self.rows
        with self._decoding():
            while not all(row.is_done for row in self.rows):
                self.leave()
                self._step()
        for row in rows:
            row.stats.paused = self._budget_for(len(rows)).paused

    def step(self) -> None:
        """One forward and all that belongs to it."""
        with self._decoding():
            self._step()

    def _decoding(self) -> AbstractContextManager[None]:
        return nullcontext() if self._run is None else self._run.decoding()

    def _step(self) -> None:
        laps = Laps(self._clock)
        rows, backend = self.rows, self.backend
        budget = self._kept_up()
        start = laps.start if self._is_settled else laps.end("prepare")
        pending, allowed = backend.num_pending, backend.max_width(self.config.max_nodes)
        step = budget.step(allowed, pending)
        trees = self._draft(step)
        drafted = laps.end("draft")
        layout = backend.lay_out(trees)
        laps.end("layout")
        logits = self._forward(layout)
        laps.end("forward")
        # The device is asked first for what the walk needs, then for the tables.
        logits = _read(rows, logits, self._device)
        laps.end("verify")
        tops = self._fetch_tops(logits, rows[0].learned)
        laps.end("learn")
        records = _verified(rows, trees)
        laps.end("verify")
        self._commit(records)
        laps.end("commit")
        self._learn(rows, records, tops)
        done = laps.end("learn")
        width = (pending or 0) + max(map(len, trees))
        took = StepTime(width, drafted - start, done - drafted - backend.setting_up)
        step.observe(took, records)
        done = laps.end("learn")
        for row, record in zip(rows, records, strict=True):
            row.stats.count_step(record)
            row.stats.num_read_again += pending or 0
            row.stats.count_time(laps.seconds, done - start, width, len(rows))
        self._tell(records)

    def leave(self) -> list[Row]:
        """Rows that walk alone leave the batch when they stop; those that move together stay.

        Returns the rows that left. The last rows move into their places, so that few are moved.
        """
        done = [row.is_done and not row.chooser.moves_together for row in self.rows]
        if not any(done):
            return []
        left = [row for row, has_left in zip(self.rows, done, strict=True) if has_left]
        live = _without_gaps(done)
        self.rows = [self.rows[i] for i in live]
        self.backend.keep_rows(live)
        return left

    def _kept_up(self) -> Budget:
        """Packs weights if that pays by now; returns the budget, with the times of such steps.

        Steps take another time once weights are packed, and once rows have come or left.
        """
        budget, run = self._budget_for(len(self.rows)), self._run
        if run is None or not isinstance(budget, MeasuredBudget):
            return budget
        kind = known = self._way[0]
        if not self._is_settled:
            run.before_step(len(self.rows))
            self._is_settled, kind = run.is_settled, self.backend.kind
        if kind != known:
            run.ledger.forgive()
        if (kind, len(self.rows)) != self._way:
            self._way = kind, len(self.rows)
            budget.curve = run.curve(self.backend, len(self.rows))
        return budget

    def _forward(self, layout: Any) -> torch.Tensor:
        """The logits of every node; shows maps what has entered the output head."""
        maps = [row.state_map for row in self.rows]
        if self._run is None or not any(each and each.wanted for each in maps):
            return self.backend.forward(layout)
        heard: list[torch.Tensor] = []
        with head_heard(self._run.model, heard.append):
            logits = self.backend.forward(layout)
        states = heard[-1][:, -logits.shape[1] :] if heard else logits[:0]
        for each, of_row in zip(maps, states, strict=False):
            if each is not None:
                each.states = of_row
        return logits

    def _draft(self, step: Step) -> list[DraftTree]:
        """A tree for each row.

        A tree is no deeper than the row's text may still grow. A row that only waits for the others
        gets the pads that are sure to come.
        """
        trees = []
        for row in self.rows:
            limits = (1 if row.is_padded else step.max_nodes, row.max_depth, step.search())
            trees.append(row.grower.grow(row.last_token, *limits))
        step.fit(trees)
        _add_pads(self.rows, trees)
        return trees

    def _fetch_tops(self, logits: torch.Tensor, learned: Learned) -> Fetched | None:
        """The tables to learn from; all rows learn alike, so any row's will do."""
        if not learned.learns:
            return None
        with self._device.side(logits):
            return self._device.fetch(*top_k(logits[..., : self._num_readable], learned.top_k))

    def _commit(self, records: list[StepRecord]) -> None:
        """Moves the KV while the CPU works until the next forward, which waits for it."""
        with self._device.side():
            self.backend.commit([record.path for record in records])
        self._device.join()

    def _learn(self, rows: list[Row], records: list[StepRecord], fetched: Fetched | None) -> None:
        if fetched is not None:
            tops = tables(*fetched.get())
            for index, record in enumerate(records):
                record.top = tops.at((index, slice(len(record.tree))))
        for row, record in zip(rows, records, strict=True):
            row.observe(record)

    def _tell(self, records: list[StepRecord]) -> None:
        for listener in tuple(self._listeners):  # One may be added or taken out meanwhile.
            for record in records:
                listener(record)

    def stop(self, index: int) -> None:
        """Ends a row where it is, since nobody reads it any more."""
        for row in self.rows:
            row.is_done = row.is_done or row.index == index

    def note(self, call: Any) -> None:
        """Notes how the forwards of a call that is over, or broke off, were run."""
        run, stats = self._run, call.stats
        assert run is not None
        stats.mode = "chain" if self.backend.chains_only else "tree"
        stats.forward = self.backend.kind
        stats.packed_bytes = run.packed_bytes
        stats.eager_reason = self.backend.reason or run.reason
        if call.draft_model is not None:
            stats.num_draft_forwards = call.draft_model.num_forwards


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


def first_tokens(rows: list[Row], prompt_logits: torch.Tensor, device: Device) -> FirstTokens:
    """Commits what the prompt's forward yields to each row, by its last logits (B, V).

    This needs neither tables nor slots for drafts, so that a streamer has the first token before
    any of them is made.
    """
    trees = [DraftTree.of_root(row.last_token) for row in rows]
    logits = _read(rows, prompt_logits[:, None], device)
    return FirstTokens(_verified(rows, trees), logits)


def _read(rows: list[Row], logits: torch.Tensor, device: Device) -> torch.Tensor:
    """Asks the device for what the walks need; returns the logits that tables are made of."""
    if fits_at_once(logits):
        logits = in_float32(logits)
    step_logits = StepLogits(logits, device)
    for index, row in enumerate(rows):
        row.chooser.read(step_logits, index)
    return logits


def _verified(rows: list[Row], trees: list[DraftTree]) -> list[StepRecord]:
    """What came of each tree, by the logits that were read.

    Each row walks down its tree by itself, unless all move together. Then the walk ends where one
    of them has no child for its token.
    """
    pairs = list(zip(rows, trees, strict=True))
    groups = [pairs] if rows[0].chooser.moves_together else [[pair] for pair in pairs]
    return [record for group in groups for record in _walked(group)]


def _walked(group: list[tuple[Row, DraftTree]]) -> list[StepRecord]:
    rows, starts = [row for row, _ in group], [row.num_new for row, _ in group]
    paths = walk([tree for _, tree in group], partial(rows[0].chooser.commit, rows))
    return [
        StepRecord(row=row.index, tree=tree, path=path, committed_ids=row.new_ids[start:])
        for (row, tree), path, start in zip(group, paths, starts, strict=True)
    ]


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

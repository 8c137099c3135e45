"""The engine: draft, lay out, forward, verify, commit, learn, for rows that share forwards.

It knows prompts, rows and how a model is run, and nothing of who waits or of what a source looks
at. A scripted model can drive it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias

from selfspec.ability.families import unplaced_id
from selfspec.cost import Budget, Step, StepTime
from selfspec.draft.drafter import Drafter
from selfspec.draft.memory import DraftMemory
from selfspec.draft.sources import RowStart
from selfspec.drafts import draft, in_halves, walked
from selfspec.forward.backends import Backend
from selfspec.forward.costs import context_bucket
from selfspec.forward.model import num_readable, run_forward
from selfspec.forward.prompt import Prefilled, read_prompt
from selfspec.kept_kv import PrefixStore
from selfspec.learning import Committed, StepOutputs, learn
from selfspec.machine.device import CPU, Device, Fetched, device_for
from selfspec.prompt import Prompt
from selfspec.records import Laps, StepRecord
from selfspec.row import Row
from selfspec.runner import ModelRunner
from selfspec.sharing import PrefixReuse
from selfspec.verify.choosers import StepLogits
from selfspec.verify.logits import top_k

OnStep: TypeAlias = Callable[[StepRecord], None]

_RETRY = "retry"  # The stage of forwards that failed and were tried again over fewer rows.


class Engine:
    """Decodes rows that share forwards: those of one prompt, or those of many that come and go.

    `admit` reads a prompt and lets its rows in, `step` runs one forward, and `leave` lets out what
    has stopped: whoever drives it calls these in turn. Rows that move together are all of the
    batch, and none of them leaves.
    """

    def __init__(
        self,
        runner: ModelRunner,
        backend: Backend,
        *,
        learned: Callable[[int], DraftMemory],  # Gets the size of the vocabulary.
        budget: Budget,
        device: Device = CPU,  # until the first prompt shows another one
        on_step: Collection[OnStep] = (),
        kept_kv: PrefixStore | str | None = None,  # None: nothing is shared. Or why it can't be.
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.backend = backend
        self.config = runner.config.changed(top_k=1) if backend.chains_only else runner.config
        self.prompts: list[Prompt] = []  # Their texts are being written.
        self.rows: list[Row] = []  # All that still decode, in the order of their prompts.
        self._runner = runner
        self.budget = budget
        self._curve_key = ("", 0, 0)
        # A source that belongs to the model looks at hidden states.
        self._model_sources = runner.sources(self.config.top_k) if backend.shows_states else []
        self._learned = learned
        self._device = device
        self._on_step = on_step
        self.reuse = PrefixReuse(kept_kv, backend)
        # Ids from this one on can't be read by the model, so nothing is learned of them.
        self._num_readable = sys.maxsize
        self._clock = clock

    def admit(self, prompt: Prompt, num_tokens: int | None = None) -> bool:
        """Reads a prompt, to its end or `num_tokens` more of it; was it read to its end?

        At the end its rows get their first tokens, which a streamer gets before anything is
        learned, and take part in the steps to come. An error leaves the rows of others as they
        were.
        """
        stats, others, start = prompt.stats, self.rows, self._clock()
        try:
            if not prompt.result.read.num_columns:
                self.reuse.begin(prompt, others)
            read_from = self._clock()
            stats.spend("prepare", read_from - start)
            # The model's own sources learn from a prompt's last hidden states.
            num_rows = len(others) + len(prompt.input_ids)
            wanted = [source.num_states(num_rows) for source in self._model_sources]
            plan, so_far = prompt.plan, prompt.result.read
            most = max(wanted, default=0)
            prefilled = read_prompt(plan, so_far, num_tokens, num_states=most)
            stats.num_prompt_tokens_kept = so_far.num_kept
            stats.spend("prefill", self._clock() - read_from)
            if prefilled is not None:
                self._join(prompt, prefilled)
        except Exception as error:
            self.reuse.free_store(error)
            if prompt.fails_alone and prompt.result.rows:
                self._keep(others)
            raise
        return prefilled is not None

    def _join(self, prompt: Prompt, prefilled: Prefilled) -> None:
        """Lets the rows of a prompt in that was read."""
        model, stats = self._runner.model, prompt.stats
        # What was learned on another vocabulary is refused before anybody gets a token.
        learned = self._learned(prefilled.logits.shape[-1]).for_request(self.config.learning)
        self._device, self._num_readable = device_for(prefilled.logits.device), num_readable(model)
        new_drafter = partial(
            Drafter,
            learned,
            config=self.config,
            num_readable=self._num_readable,
            banned=unplaced_id(model),
        )
        shared = RowStart(
            budget=self.budget,
            num_rows=len(self.rows) + len(prompt.input_ids),
            kv=None if self.backend.chains_only else self.backend.kv,
        )
        rows = prompt.new_rows(prefilled, shared, self._model_sources, new_drafter)
        self.reuse.joined(prompt, prefilled)
        # A streamer has the first tokens before there are tables, or slots for drafts.
        logits = StepLogits(prefilled.logits[:, None], self._device)
        records = walked(rows, logits, of_prompt=True)
        stats.table_bytes = learned.nbytes
        self.backend.admit(
            prefilled,
            rows,
            self.rows,
            max_new_columns=prompt.max_new_columns,
            max_tree=prompt.config.max_nodes,
        )
        self.add(rows, records, logits)
        self.prompts.append(prompt)
        prompt.result.kv = prefilled.cache

    def add(
        self, rows: list[Row], records: Sequence[StepRecord | None], logits: StepLogits
    ) -> None:
        """Lets in rows that have their first tokens, by some logits (B, 1, V); learns from them."""
        laps = Laps(self._clock)
        self.rows = [*self.rows, *rows]
        committed = learn(rows, records, StepOutputs(logits, self._fetch_tables(logits)))
        laps.end("learn")
        for row in rows:
            row.stats.count_time(laps, len(rows))
        self._tell_steps(committed)

    def step(self) -> None:
        """One forward over a tree for each row, and all that belongs to it.

        Whoever calls it has entered `ModelRunner.decoding`.
        """
        laps, committed = Laps(self._clock), list[Committed]()
        step = self._next_step()
        start = laps.end("draft")
        draft(self.rows, step)
        time_to_draft = laps.end("draft") - start
        width = max(len(row.tree) for row in self.rows)
        run, may_retry = partial(self._forward, laps), partial(self._may_retry, laps)
        for rows, outputs in in_halves(self.rows, run, may_retry):
            records = walked(rows, outputs.logits)
            laps.end("verify")
            self.backend.kv.commit([[] if record is None else record.path for record in records])
            # Where drafts led to NaN, their slots are emptied.
            if spoiled := [index for index, row in enumerate(rows) if row.is_spoiled]:
                self.backend.kv.wipe(spoiled)
            laps.end("commit")
            committed += learn(rows, records, outputs)
            laps.end("learn")
        rest = laps.total - laps.seconds["draft"] - self.backend.setting_up
        if _RETRY not in laps.seconds:
            time = StepTime(width, time_to_draft, rest)
            step.observe(time, [record for _, record in committed])
            laps.end("learn")
        for row, record in committed:
            row.stats.count_step(record)
            row.stats.count_time(laps, len(committed), width)
        self._tell_steps(committed)

    def _next_step(self) -> Step:
        """Lets cursors that take time work, then asks the budget how wide the step may be."""
        backend, budget, num_rows = self.backend, self.budget, len(self.rows)
        curve_key = (backend.forward_name, num_rows, context_bucket(backend.kv.tree_start))
        if curve_key != self._curve_key:
            self._curve_key = curve_key
            budget.use_curve(
                num_rows, self._runner.costs.curve(self._runner.model, backend, num_rows)
            )
        for source in self._model_sources:
            source.before_step(num_rows, budget)
        for row in self.rows:
            with row.guarded():
                if row.max_nodes > 1:
                    row.drafter.prepare()
        return budget.step(backend.max_width(self.config.max_nodes))

    def _may_retry(self, laps: Laps, error: Exception) -> bool:
        """May a forward that has failed be tried again? If kept texts have given it memory."""
        laps.end(_RETRY)
        return self.reuse.free_store(error)

    def _forward(self, laps: Laps, rows: list[Row]) -> StepOutputs:
        """Runs a forward, and lets the device send what the walks and the sources need."""
        layout = self.backend.lay_out(rows, [row.tree for row in rows])
        laps.end("layout")
        # A captured forward shows nobody its states.
        wanted = self.backend.shows_states and any(row.drafter.wants_states for row in rows)
        logits, states = run_forward(self._runner.model, layout, with_states=wanted)
        laps.end("forward")
        # The device is asked first for what the walk needs, then for the tables.
        read = StepLogits(logits, self._device)
        laps.end("verify")
        outputs = StepOutputs(read, self._fetch_tables(read), states)
        laps.end("learn")
        return outputs

    def _fetch_tables(self, logits: StepLogits) -> Fetched | None:
        """Lets the likeliest tokens at each node come to the CPU; None where nobody learns."""
        config = self._runner.config
        if config.learning == "frozen":
            return None
        readable = logits.logits[..., : self._num_readable]
        return self._device.fetch(*top_k(readable, config.top_k))

    def leave(self) -> list[Prompt]:
        """Lets out rows that have stopped, and returns the prompts of which all have.

        The last rows move into the places of those that leave, so that few are moved. Rows that
        move together stay, and one whose KV somebody gets.
        """
        over = [prompt for prompt in self.prompts if all(row.is_done for row in prompt.result.rows)]
        if over:
            self.reuse.ended(over)
            self.prompts = [prompt for prompt in self.prompts if prompt not in over]
        rows = list(self.rows)
        for index, row in reversed(list(enumerate(rows))):
            if row.is_done and row.may_leave:
                rows[index] = rows[-1]
                rows.pop()
        if len(rows) < len(self.rows):
            self._keep(rows)
        return over

    def _keep(self, rows: list[Row]) -> None:
        self.rows = rows
        self.backend.kv.keep_rows(rows)

    def _tell_steps(self, committed: list[Committed]) -> None:
        for on_step in tuple(self._on_step):  # One may be added or taken out meanwhile.
            for row, record in committed:
                with row.guarded():
                    if record.path:
                        on_step(record)

    def record_how_it_ran(self, prompt: Prompt) -> None:
        """Writes into its statistics how a prompt that is over, or broke off, was decoded."""
        stats = prompt.stats
        self._runner.describe(stats, self.backend, prompt.draft_model)
        stats.paused = self.budget.paused(stats.num_plain_steps, stats.num_steps)

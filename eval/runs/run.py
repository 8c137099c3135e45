"""From what was asked to a folder of rows, and to its report.

The folder is the run: started again with the same options, it goes on where it was; with a higher
limit it becomes longer; asked anything else, it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from eval.benches.registry import load_bench
from eval.errors import EvalError, one_line
from eval.report.rows import ROWS, SCHEMA, Record, RowFile, read_record
from eval.runs.asked import Asked, Shard
from eval.runs.batches import Batch
from eval.runs.contest import Contest
from eval.runs.environment import check_same, environment
from eval.runs.plan import Plan, make_plan
from eval.runs.progress import RunProgress, answer_line
from eval.runs.stage import Stage, check_methods, set_stage
from selfspec.machine.user_files import replace_text


def run(asked: Asked, shard: Shard, rows: Path, progress: RunProgress) -> Record | None:
    """Measures what is missing and appends it to `rows`; returns all that was measured.

    None where other shards are at work.
    """
    check_methods(asked)
    bench = load_bench(asked.bench, asked.questions)
    progress.say("loading the model")
    stage = set_stage(asked, shard)
    plan = make_plan(asked, bench, stage)
    settings = {
        **asked.settings(),
        "dtype": str(stage.model.dtype).removeprefix("torch."),
        "device": stage.model.device.type,
        "prompt_format": stage.prompter.format,
        "questions_sha256": bench.sha256,
    }
    with progress:
        _Runner(asked, shard, rows, stage, plan, progress).go(settings)
    return _complete(asked, plan)


@dataclass
class _Runner:
    """One process's part of a run."""

    asked: Asked
    shard: Shard
    rows: Path
    stage: Stage
    plan: Plan
    progress: RunProgress

    def go(self, settings: dict[str, Any]) -> None:
        """Answers what this shard has to answer and nobody has answered yet."""
        head = self._head(settings)
        known = read_record(self.asked.output)
        if known.runs:
            check_same(self.asked.output, known.runs[0], head)
        own = self.plan.measured[self.shard.rank :: self.shard.num_shards]
        rounds = [_Round.of(number, own, self.asked, known) for number in range(self.asked.rounds)]
        absent = [f"{name} is left out: {why}" for name, why in head["left_out"].items()]
        for note in [f"state: {self.asked.state}", *self.plan.notes, *absent]:
            self.progress.say(note)
        if not any(each.to_do for each in rounds):
            return
        rows = RowFile(self.rows)
        rows.append([head])
        self._pay_for_first_calls(own)
        for each in rounds:
            if each.to_do:
                self._answer(each, head["run"], known, rows)
        if known.curve is None and self.shard.rank == 0:
            rows.append(self._curve())

    def _head(self, settings: dict[str, Any]) -> dict[str, Any]:
        started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        model, tokenizer = self.stage.model, self.stage.prompter.tokenizer
        asked = self.asked
        return {
            "kind": "run",
            "schema": SCHEMA,
            "run": f"{started}/{self.shard.rank}",
            "num_shards": self.shard.num_shards,
            "settings": settings,
            "environment": environment(model, tokenizer, asked.cache, asked.compared_caches),
            "num_asked": len(self.plan.measured),
            "notes": self.plan.notes,
            "left_out": self.stage.left_out(),
        }

    def _pay_for_first_calls(self, own: Sequence[Batch]) -> None:
        """What only first calls cost has no part in any answer."""
        self.progress.say("warming up")
        longest, *others = _longest_of_each_order(own)
        self._contest(self.asked).warm_up(longest)
        briefly = self._contest(replace(self.asked, max_new_tokens=1))
        for batch in others:
            briefly.warm_up(batch._replace(num_turns=1))

    def _contest(self, asked: Asked, run: str = "", number: int = 0) -> Contest:
        return Contest(self.stage, asked, run, told=self.progress.meanwhile, number=number)

    def _answer(self, this: _Round, run: str, known: Record, rows: RowFile) -> None:
        """A round from the start: what was known before a stop is learned again."""
        if self.asked.rounds > 1:
            self.progress.say(f"round {this.number + 1} of {self.asked.rounds}")
        if this.done:
            num_all = len(this.done) + len(this.to_do)
            self.progress.say(f"{len(this.done)} of {num_all} are answered already")
        contest = self._contest(self.asked, run, this.number)
        contest.forget()
        self._catch_up(contest, this.done, known)
        self._measure(contest, this.to_do, rows)

    def _catch_up(self, contest: Contest, done: Sequence[Batch], known: Record) -> None:
        """Methods learn of the warm-up's questions, and again of those that are done."""
        warming = self.progress.stage("warm-up", len(self.plan.warm_up))
        for batch in self.plan.warm_up:
            warming(answer_line(contest.answer(batch), self._names))
        catching_up = self.progress.stage("catching up", len(done))
        for batch in done:
            keys = [(*batch.ids, turn) for turn in range(batch.num_turns)]
            prompts = [known.texts[key]["prompt_ids"] for key in keys if key in known.texts]
            contest.catch_up(batch, prompts)
            catching_up("is done; what was learned of it is learned again")

    def _measure(self, contest: Contest, to_do: Sequence[Batch], rows: RowFile) -> None:
        questions = self.progress.stage("questions", len(to_do))
        for batch in to_do:
            lines = contest.answer(batch)
            rows.append(lines)
            questions(answer_line(lines, self._names))

    @cached_property
    def _names(self) -> list[str]:
        """Of those who can take part."""
        left_out = self.stage.left_out()
        return [name for name in self.asked.methods if name not in left_out]

    def _curve(self) -> list[dict[str, Any]]:
        """What a forward costs by its width here, behind a prompt of the usual length."""
        answers = read_record(self.rows).answers.values()
        given = [(each.numbers, len(each.questions)) for each in answers]
        lengths = [each.num_prompt_tokens / rows for each, rows in given if each is not None]
        if not lengths:
            return []
        num_columns = int(median(lengths))
        try:
            curve = self.stage.curve(num_columns, self.asked.batch_size)
        except (RuntimeError, ValueError, IndexError) as error:
            self.progress.say(f"no curve of what a forward costs: {one_line(error)}")
            return []
        return [{"kind": "curve", "num_columns": num_columns, **curve.as_dict()}]


class _Round(NamedTuple):
    """All questions once, from the state of the start."""

    number: int
    done: list[Batch]
    to_do: list[Batch]

    @classmethod
    def of(cls, number: int, own: Sequence[Batch], asked: Asked, known: Record) -> _Round:
        """What is answered already in that round, and what is not."""
        this = cls(number, [], [])
        for batch in own:
            keys = batch.keys(asked.methods, number)
            is_done = all(key in known.answers for key in keys)
            (this.done if is_done else this.to_do).append(batch)
        return this


def _longest_of_each_order(own: Sequence[Batch]) -> list[Batch]:
    """What is allocated for the longest serves all; what a forward costs is measured by order."""
    by_order = {_num_letters(batch).bit_length(): batch for batch in sorted(own, key=_num_letters)}
    return list(by_order.values())[::-1]


def _num_letters(batch: Batch) -> int:
    return max(sum(map(len, question.turns)) for question in batch.questions)


def _complete(asked: Asked, plan: Plan) -> Record | None:
    """What was measured, where nothing is missing; the shards' lines become one file."""
    record = read_record(asked.output)
    if any(key not in record.answers for key in plan.keys(asked)):
        return None
    if len(list(asked.output.glob("rows*.jsonl"))) > 1:
        _merge(asked.output, record)
    return record


def _merge(folder: Path, record: Record) -> None:
    """The shards' own files stay."""
    text = "".join(f"{json.dumps(line)}\n" for line in record.lines())
    try:
        replace_text(folder / ROWS, text)
    except OSError as error:
        raise EvalError(
            f"{folder / ROWS} must be writable ({error.strerror}); the shards' rows are all there: "
            "make room and run the same command again"
        ) from error

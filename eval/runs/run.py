"""From what was asked to a folder of rows, and to its report.

The folder is the run: started again with the same options, it goes on where it was; with a higher
limit it becomes longer; asked anything else, it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from eval.benches.registry import load_bench
from eval.errors import one_line
from eval.report.rows import SCHEMA, Line, Record, append, read_record
from eval.runs.asked import Asked
from eval.runs.contest import Contest
from eval.runs.environment import check_same, environment
from eval.runs.plan import Plan, Planned, make_plan
from eval.runs.progress import RunProgress, answer_line
from eval.runs.stage import Stage, check_methods, set_stage


def measure(asked: Asked, rows: Path, progress: RunProgress) -> Record:
    """Measures what is missing and appends it to `rows`; returns all that was measured."""
    check_methods(asked)
    bench = load_bench(asked.bench, asked.questions)
    progress.say("loading the model")
    stage = set_stage(asked)
    plan = make_plan(asked, bench, stage)
    settings = {
        **asked.settings(),
        "dtype": str(stage.model.dtype).removeprefix("torch."),
        "device": stage.model.device.type,
        "prompt_format": stage.prompter.format,
        "questions_sha256": bench.sha256,
    }
    _Runner(asked, rows, stage, plan, progress).go(settings)
    return read_record(rows)


@dataclass
class _Runner:
    """What a run goes through."""

    asked: Asked
    rows: Path
    stage: Stage
    plan: Plan
    progress: RunProgress

    def go(self, settings: dict[str, Any]) -> None:
        """Answers what was not answered yet."""
        head = self._head(settings)
        known = read_record(self.rows)
        if known.runs:
            check_same(self.asked.output, known.runs[0], head)
        rounds = [
            _Round.of(n, self.plan.measured, self.asked, known) for n in range(self.asked.rounds)
        ]
        absent = [f"{name} is left out: {why}" for name, why in head["left_out"].items()]
        for note in [f"state: {self.asked.state}", *self.plan.notes, *absent]:
            self.progress.say(note)
        if not any(this.to_do for this in rounds):
            return
        append(self.rows, [head])
        self._pay_for_first_calls()
        for this in rounds:
            if this.to_do:
                self._answer(this, head["run"], known)
        if known.curve is None:
            append(self.rows, self._curve())

    def _head(self, settings: dict[str, Any]) -> dict[str, Any]:
        started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return {
            "kind": "run",
            "schema": SCHEMA,
            "run": started,
            "settings": settings,
            "environment": environment(self.stage.model),
            "num_asked": len(self.plan.measured),
            "notes": self.plan.notes,
            "left_out": self.stage.left_out(),
        }

    def _pay_for_first_calls(self) -> None:
        """What only first calls cost has no part in any answer."""
        self.progress.say("warming up")
        longest, *others = _longest_of_each_order(self.plan.measured)
        self._contest(self.asked).warm_up(longest)
        briefly = self._contest(replace(self.asked, max_new_tokens=1))
        for planned in others:
            briefly.warm_up(planned._replace(num_turns=1))

    def _contest(self, asked: Asked, run: str = "", number: int = 0) -> Contest:
        return Contest(self.stage, asked, run, told=self.progress.meanwhile, number=number)

    def _answer(self, this: _Round, run: str, known: Record) -> None:
        """A round from the start: what was known before a stop is learned again."""
        if self.asked.rounds > 1:
            self.progress.say(f"round {this.number + 1} of {self.asked.rounds}")
        if this.done:
            num_all = len(this.done) + len(this.to_do)
            self.progress.say(f"{len(this.done)} of {num_all} are answered already")
        contest = self._contest(self.asked, run, this.number)
        contest.forget()
        self._catch_up(contest, this.done, known)
        self._measure(contest, this.to_do)

    def _catch_up(self, contest: Contest, done: Sequence[Planned], known: Record) -> None:
        """Methods learn of the warm-up's questions, and again of those that are done."""
        warming = self.progress.stage(len(self.plan.warm_up))
        for planned in self.plan.warm_up:
            warming(answer_line(contest.answer(planned), self._names))
        catching_up = self.progress.stage(len(done))
        for planned in done:
            keys = [(planned.question.id, turn) for turn in range(planned.num_turns)]
            prompts = [known.texts[key]["prompt_ids"] for key in keys if key in known.texts]
            contest.catch_up(planned, prompts)
            catching_up("is done; what was learned of it is learned again")

    def _measure(self, contest: Contest, to_do: Sequence[Planned]) -> None:
        questions = self.progress.stage(len(to_do))
        for planned in to_do:
            lines = contest.answer(planned)
            append(self.rows, lines)
            questions(answer_line(lines, self._names))

    @cached_property
    def _names(self) -> list[str]:
        """Of those who can take part."""
        left_out = self.stage.left_out()
        return [name for name in self.asked.methods if name not in left_out]

    def _curve(self) -> list[Line]:
        """What a forward costs by its width here, after a prompt of the usual length."""
        answers = read_record(self.rows).frame
        lengths = answers.num_prompt_tokens.dropna()
        if lengths.empty:
            return []
        num_columns = int(lengths.median())
        try:
            curve = self.stage.curve(num_columns)
        except (RuntimeError, ValueError, IndexError) as error:
            self.progress.say(f"no curve of what a forward costs: {one_line(error)}")
            return []
        points = {width: curve.seconds(width) for width in curve.widths}
        of_widths = {"widths": list(points), "seconds": list(points.values())}
        return [{"kind": "curve", "num_columns": num_columns, **of_widths}]


class _Round(NamedTuple):
    """All questions once, from the state of the start."""

    number: int
    done: list[Planned]
    to_do: list[Planned]

    @classmethod
    def of(cls, number: int, own: Sequence[Planned], asked: Asked, known: Record) -> _Round:
        """What is answered already in that round, and what is not."""
        this = cls(number, [], [])
        for planned in own:
            keys = planned.keys(asked.methods, number)
            is_done = all(key in known.answers for key in keys)
            (this.done if is_done else this.to_do).append(planned)
        return this


def _longest_of_each_order(own: Sequence[Planned]) -> list[Planned]:
    """What is allocated for the longest serves all; what a forward costs is measured by order."""
    by_order = {
        _num_letters(planned).bit_length(): planned for planned in sorted(own, key=_num_letters)
    }
    return list(by_order.values())[::-1]


def _num_letters(planned: Planned) -> int:
    return sum(map(len, planned.question.turns))

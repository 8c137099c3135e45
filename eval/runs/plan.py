"""Which questions of a bench are asked, which warm the methods up, and which are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eval.benches.questions import Question, limited, select, spread
from eval.benches.registry import Loaded
from eval.errors import EvalError
from eval.report.rows import Key
from eval.runs.asked import Asked
from eval.runs.stage import Stage


class Planned(NamedTuple):
    """A question and how many of its turns are asked.

    `number` is its own in the bench and goes into the seed, so that a longer run draws the same;
    `order` is its own among those that are asked, and decides who answers first.
    """

    number: int
    order: int
    question: Question
    num_turns: int

    def keys(self, methods: Sequence[str], number: int = 0) -> list[Key]:
        """Of all answers that there will be in the round of that number."""
        turns = range(self.num_turns)
        return [Key(self.question.id, turn, name, number) for turn in turns for name in methods]

    def __str__(self) -> str:
        return f"{self.question.task} {self.question.id}"


class Plan(NamedTuple):
    """What is answered, in order, and what there is to say about it."""

    warm_up: list[Planned]  # answered by all, measured by nobody
    measured: list[Planned]
    notes: list[str]


def make_plan(asked: Asked, bench: Loaded, stage: Stage) -> Plan:
    """The questions whose prompt and answer fit, those of the warm-up taken off first."""
    chosen = select(bench.questions, asked.slice)
    fitting = [question for question in chosen if _fits(question, asked, stage)]
    warm_up = spread(fitting, asked.warm_up)
    taken = {question.id for question in warm_up}
    rest = [question for question in fitting if question.id not in taken]
    measured = limited(rest, asked.slice)
    if not measured:
        raise EvalError(
            f"{bench.name} must leave a question to measure (got none of {len(chosen)}); lower "
            "--warm-up or --max-new-tokens, or raise --max-prompt-tokens"
        )
    notes = [f"{len(measured)} questions of {bench.name}"]
    if len(fitting) < len(chosen):
        notes.append(f"{len(chosen) - len(fitting)} questions left out: their prompts are too long")
    if stage.prompter.format == "plain":
        notes.append("no chat template is used: the model goes on with each question as plain text")
    numbers = {question.id: number for number, question in enumerate(bench.questions)}

    def planned(questions: Sequence[Question]) -> list[Planned]:
        return [
            Planned(
                numbers[question.id],
                order,
                question,
                min(len(question.turns), asked.turns or len(question.turns)),
            )
            for order, question in enumerate(questions)
        ]

    return Plan(planned(warm_up), planned(measured), notes)


def _fits(question: Question, asked: Asked, stage: Stage) -> bool:
    """By its first turn. Where not even a prompt can be made, the rows will say so."""
    try:
        length = len(stage.prompter.prompt_ids(question, []))
    except Exception:  # templates are programs of others
        return True
    short_enough = asked.max_prompt_tokens is None or length <= asked.max_prompt_tokens
    return short_enough and stage.no_room(length, asked.max_new_tokens) is None

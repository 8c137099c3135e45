"""One question, answered by every method in turn.

The methods' order moves on by one from question to question and from turn to turn. All get the
same prompt: what is fed back in a later turn is the reference's answer, which is stock's where
stock takes part. A method that fails has a row that says so, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eval.errors import one_line
from eval.methods.method import SelfSpecMethod, StaticMethod
from eval.methods.names import STOCK, rotated
from eval.report.rows import Line
from eval.runs.asked import Asked
from eval.runs.attempt import Outcome, attempt
from eval.runs.plan import Planned
from eval.runs.sameness import compare
from eval.runs.stage import Stage


class _Round(NamedTuple):
    """One turn of a question: the prompt, and every method's outcome in the order they came."""

    planned: Planned
    turn: int
    prompt_ids: list[int]
    outcomes: dict[str, Outcome]

    def reference(self) -> str | None:
        """Stock where it answered, else the first in the alphabet that did."""
        names = sorted(name for name, outcome in self.outcomes.items() if outcome.error is None)
        return STOCK if STOCK in names else next(iter(names), None)

    def text_line(self, said: list[int]) -> Line:
        return {
            "kind": "text",
            "question": self.planned.question.id,
            "turn": self.turn,
            "prompt_ids": self.prompt_ids,
            "output_ids": said,
        }


class Contest:
    """Puts questions to all methods of a stage, in turn, and says what came of it."""

    def __init__(
        self, stage: Stage, asked: Asked, run: str, *, told: Callable[[str], None], number: int = 0
    ) -> None:
        """`told` hears of each answer; `number` is the round's."""
        self._stage = stage
        self._refusals = stage.left_out()
        self._asked = asked
        self._run = run
        self._told = told
        self._number = number

    def warm_up(self, planned: Planned) -> None:
        """Pays for what only first calls cost; what was learned by it is forgotten."""
        self.answer(planned)
        self.forget()

    def forget(self) -> None:
        for method in self._stage.methods.values():
            method.forget()

    def catch_up(self, planned: Planned, prompts: Sequence[Sequence[int]]) -> None:
        """Lets those who learn answer the recorded prompts of each turn, measured by nobody."""
        for prompt_ids in prompts:
            for name, method in self._stage.methods.items():
                if method.learns:
                    self._attempt(name, prompt_ids, planned)

    def answer(self, planned: Planned) -> list[Line]:
        """The lines of all turns: answers, and the reference's texts."""
        lines: list[Line] = []
        texts: list[str] = []
        for turn in range(planned.num_turns):
            ids = self._prompt_ids(planned, texts)
            if isinstance(ids, str):
                return lines + self._failed(planned, turn, ids)
            names = self._order(planned, turn)
            outcomes = {name: self._attempt(name, ids, planned) for name in names}
            this = _Round(planned, turn, ids, outcomes)
            lines += self._lines(this)
            if (reference := this.reference()) is None:
                return lines + self._failed(planned, turn + 1, f"no method answered turn {turn}")
            said = outcomes[reference].new_ids
            lines.append(this.text_line(said))
            texts.append(self._stage.prompter.text(said))
        return lines

    def _prompt_ids(self, planned: Planned, texts: list[str]) -> list[int] | str:
        """The ids of the question's turn, or why there are none."""
        try:
            ids = self._stage.prompter.prompt_ids(planned.question, texts)
        except Exception as error:  # templates are programs of others
            return one_line(error)
        return self._stage.no_room(len(ids), self._asked.max_new_tokens) or ids

    def _order(self, planned: Planned, turn: int) -> list[str]:
        return rotated(list(self._stage.methods), planned.order + turn + self._number)

    def _attempt(self, name: str, prompt_ids: Sequence[int], planned: Planned) -> Outcome:
        if (refusal := self._refusals.get(name)) is not None:
            return Outcome([], {}, refusal)
        outcome = attempt(
            self._stage.model,
            self._stage.methods[name],
            prompt_ids,
            max_new_tokens=self._asked.max_new_tokens,
            temperature=self._asked.temperature,
            seed=self._asked.seed + planned.number,
        )
        self._told(f"{name} answered {planned}")
        return outcome

    def _lines(self, this: _Round) -> list[Line]:
        lines = []
        for order, (name, outcome) in enumerate(this.outcomes.items()):
            answer = self._filed(this.planned, this.turn, name, order)
            if outcome.error is None:
                verdict = self._verdict(this, name)
                lines.append(answer(numbers={**outcome.numbers, **verdict}))
            else:
                lines.append(answer(error=outcome.error))
        return lines

    def _verdict(self, this: _Round, name: str) -> dict[str, Any]:
        """What stock's own drafters sample is drawn otherwise, and no worse for it: no verdict."""
        greedy = self._asked.temperature == 0
        draws_alike = isinstance(self._stage.methods[name], (SelfSpecMethod, StaticMethod))
        if this.reference() != STOCK or name == STOCK or not (greedy or draws_alike):
            return {}
        texts = (this.outcomes[each].new_ids for each in (STOCK, name))
        return compare(self._stage.model, this.prompt_ids, *texts, greedy=greedy)._asdict()

    def _failed(self, planned: Planned, first_turn: int, error: str) -> list[Line]:
        return [
            self._filed(planned, turn, name, order)(error=error)
            for turn in range(first_turn, planned.num_turns)
            for order, name in enumerate(self._order(planned, turn))
        ]

    def _filed(self, planned: Planned, turn: int, name: str, order: int) -> Callable[..., Line]:
        """Makes the line of an answer of numbers or of an error."""
        about: Line = {
            "kind": "answer",
            "run": self._run,
            "method": name,
            "task": planned.question.task,
            "question": planned.question.id,
            "turn": turn,
            "order": order,
            "round": self._number,
        }
        return lambda **what: {**about, **what}

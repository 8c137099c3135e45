"""Several methods on the same prompts, in turns: prompt by prompt, each time in another order.

So a slow moment of the machine, or a warm one, comes to all of them. Knows methods and the
clock; not where prompts come from, nor what becomes of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from eval.answers import STOCK, Answer, Row
from eval.methods import Method
from eval.prompts import Prompts
from eval.setup import one_line
from eval.timing import num_new_tokens, timed

__all__ = ["Asked", "catch_up", "first_difference", "measure", "warm_up"]
_WARM_UP_TOKENS = 8


class Asked(NamedTuple):
    """How every prompt is answered; prompt number n has the seed `seed` + n."""

    max_new_tokens: int
    temperature: float
    seed: int


def warm_up(
    model: Any, methods: Sequence[Method], prompts: Prompts, asked: Asked
) -> dict[str, str]:
    """Pays for what only first calls cost; returns who can't take part, and why.

    The longest prompt is answered in full, since what is compiled or allocated for it serves all;
    then the longest of each lower order of length, for each of which a cost curve may have to be
    measured. What was learned by it is forgotten. Where stock itself fails, so does this.
    """
    reasons: dict[str, str] = {}
    for method in methods:
        reason = method.refusal(model)
        try:
            for number, ids in enumerate([] if reason else _longest_of_each_order(prompts)):
                short = asked._replace(max_new_tokens=min(_WARM_UP_TOKENS, asked.max_new_tokens))
                _answer(model, method, ids, short if number else asked, 0)
        except Exception as error:
            if method.name == STOCK:
                raise
            reason = one_line(error)
        method.forget()
        if reason is not None:
            reasons[method.name] = reason
    return reasons


def catch_up(model: Any, methods: Sequence[Method], prompts: Prompts, asked: Asked) -> None:
    """Answers prompts again that an earlier run has rows of, for what is learned from them."""
    for method in methods:
        for number, (_, ids) in enumerate(prompts if method.learns else ()):
            _attempt(model, method, ids, asked, number)


def measure(
    model: Any, methods: Sequence[Method], prompts: Prompts, asked: Asked, *, start: int = 0
) -> Iterator[Row]:
    """A row for each prompt from number `start` on, as soon as all have answered it."""
    for number in range(start, len(prompts)):
        question, ids = prompts[number]
        turn = number % len(methods)
        outcomes = {
            method.name: _attempt(model, method, ids, asked, number)
            for method in (*methods[turn:], *methods[:turn])
        }
        num_prompt_tokens = ids.shape[1]
        stock = outcomes[STOCK].new_ids
        answers = {name: outcome.beside(stock) for name, outcome in outcomes.items()}
        yield Row(question.id, question.task, num_prompt_tokens, answers)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two texts differ, be it that one has ended; None: nowhere."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((place for place, (a, b) in pairs if a != b), shorter)


class _Outcome(NamedTuple):
    """An answer, and the ids that it has behind the prompt; None where it failed."""

    answer: Answer
    new_ids: list[int] | None

    def beside(self, stock: list[int] | None) -> Answer:
        """The answer, compared with stock's text."""
        if stock is None or self.new_ids is None:
            return self.answer
        place = first_difference(self.new_ids, stock)
        return self.answer._replace(same=place is None, differs_at=place)


def _attempt(model: Any, method: Method, ids: torch.Tensor, asked: Asked, number: int) -> _Outcome:
    """A failure is an outcome too: the others go on, and the row says it."""
    try:
        result = timed(model, lambda: _answer(model, method, ids, asked, number))
    except Exception as error:
        return _Outcome(Answer(error=one_line(error)), None)
    answer = Answer(
        num_new_tokens=num_new_tokens(result.output, ids),
        seconds=result.seconds,
        prefill_seconds=result.prefill_seconds,
        stats=method.stats,
    )
    return _Outcome(answer, result.output[0, ids.shape[1] :].tolist())


def _answer(
    model: Any, method: Method, ids: torch.Tensor, asked: Asked, number: int
) -> torch.Tensor:
    return method.answer(
        model,
        ids.to(model.device),
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        seed=asked.seed + number,
    )


def _longest_of_each_order(prompts: Prompts) -> list[torch.Tensor]:
    """Of prompts of 64 to 127 tokens, of 128 to 255, … the longest one; longest order first."""
    ascending = sorted((ids for _, ids in prompts), key=lambda ids: ids.shape[1])
    by_order = {ids.shape[1].bit_length(): ids for ids in ascending}
    return list(by_order.values())[::-1]

"""What the methods made of one prompt, and its line of JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from selfspec.records import GenerationStats

__all__ = ["STOCK", "Answer", "Row", "row_from_json", "row_to_json"]

STOCK = "stock"  # the method that all others are compared with


class Answer(NamedTuple):
    """One method's answer to one prompt; where there is an `error`, nothing else counts.

    `differs_at` is the first of the new tokens that is not stock's; `same` is None where stock
    has no answer to compare with.
    """

    num_new_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    same: bool | None = None
    differs_at: int | None = None
    stats: GenerationStats | None = None
    error: str | None = None

    @property
    def seconds_per_token(self) -> float:
        """Of the whole call."""
        return self.seconds / max(self.num_new_tokens, 1)

    @property
    def decode_seconds(self) -> float:
        """All but the prompt's forward."""
        return self.seconds - self.prefill_seconds

    @property
    def num_decoded(self) -> int:
        """The tokens behind the one that the prompt's forward yields."""
        return max(self.num_new_tokens - 1, 0)


class Row(NamedTuple):
    """One prompt, with the answers of all methods in the order they were given."""

    id: int | str
    task: str
    num_prompt_tokens: int
    answers: dict[str, Answer]


def row_to_json(row: Row) -> dict[str, Any]:
    """Plain values; a failed answer is its error alone."""
    answers = {name: _answer_to_json(answer) for name, answer in row.answers.items()}
    return {**row._asdict(), "answers": answers}


def row_from_json(values: Mapping[str, Any]) -> Row:
    """Back from `row_to_json`; KeyError or TypeError where that is not what the values are."""
    answers = {
        name: Answer(**{**answer, "stats": _stats_from_json(answer.get("stats"))})
        for name, answer in values["answers"].items()
    }
    return Row(**{**values, "answers": answers})


def _answer_to_json(answer: Answer) -> dict[str, Any]:
    if answer.error is not None:
        return {"error": answer.error}
    values = answer._asdict()
    del values["error"]
    return {**values, "stats": _stats_to_json(answer.stats)}


def _stats_to_json(stats: GenerationStats | None) -> dict[str, Any] | None:
    return None if stats is None else {f.name: getattr(stats, f.name) for f in fields(stats)}


def _stats_from_json(values: Mapping[str, Any] | None) -> GenerationStats | None:
    """JSON turns the counted lengths into strings, and every counter into a plain object."""
    if values is None:
        return None
    stats = GenerationStats(**values)
    for field in fields(stats):
        held = getattr(stats, field.name)
        if isinstance(held, Mapping):
            setattr(stats, field.name, Counter(held))
    lengths = stats.accepted_lengths.items()
    stats.accepted_lengths = Counter({int(length): count for length, count in lengths})
    return stats

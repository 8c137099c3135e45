"""Questions in Spec-Bench's own schema, and the slice of them that measurements run on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.errors import EvalError

__all__ = ["Question", "encode", "measuring_set", "read_questions"]

# Spec-Bench files MT-Bench's eight categories under one task
_MULTI_TURN = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)
_EVERY = 10  # of a task's questions the 1st, 11th, 21st, … are measured
_MAX_PROMPT_TOKENS = 1300


@dataclass(frozen=True)
class Question:
    """One question: its task and the user's turns."""

    id: int
    task: str
    turns: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    """Reads a `question.jsonl`; a malformed line is named by its number."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            task = entry["category"]
            task = "multi-turn" if task in _MULTI_TURN else task
            questions.append(Question(entry["question_id"], task, tuple(entry["turns"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise EvalError(
                f"{path} line {number} must be a JSON object with question_id, category and turns "
                f"(got {line[:60]!r}: {error})"
            ) from error
    return questions


def encode(tokenizer: Any, question: Question) -> torch.Tensor:
    """(1, L): the first turn under the tokenizer's chat template."""
    messages = [{"role": "user", "content": question.turns[0]}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def measuring_set(
    tokenizer: Any, questions: Iterable[Question], *, offset: int = 0, every: int = _EVERY
) -> list[tuple[Question, torch.Tensor]]:
    """Every tenth question of each task, from its first on, whose prompt is not too long.

    `offset` picks other tenths, for tuning on questions that nothing is measured on; `every`
    takes more or fewer than a tenth.
    """
    seen: dict[str, int] = {}
    chosen = []
    for question in questions:
        place = seen.setdefault(question.task, 0)
        seen[question.task] += 1
        if place % every != offset:
            continue
        ids = encode(tokenizer, question)
        if ids.shape[1] <= _MAX_PROMPT_TOKENS:
            chosen.append((question, ids))
    return chosen

"""Texts of random tokens, which no draft can guess: what drafting costs when it brings nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question

_NUM_TEXTS = 200
_NUM_TOKENS = 200  # of each


def random_questions() -> list[Question]:
    """Questions that say nothing: their ids stand for them."""
    return [Question(index, "random", ("",)) for index in range(_NUM_TEXTS)]


class RandomPrompter(Prompter):
    """Puts a random text in the place of each question, drawn evenly from the ordinary tokens."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self.format = "random"
        self._seed, special = seed, set(tokenizer.all_special_ids)
        self._ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])

    def prompt_ids(self, question: Question, answers: Sequence[str]) -> list[int]:
        """The same ids whatever was said."""
        generator = torch.Generator().manual_seed(self._seed * _NUM_TEXTS + int(question.id))
        drawn = torch.randint(len(self._ordinary), (_NUM_TOKENS,), generator=generator)
        return list(self._ordinary[drawn].tolist())

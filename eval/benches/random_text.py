"""Texts of random tokens, which no draft can guess: what drafting costs when it brings nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question

NUM_TEXTS = 200
_NUM_TOKENS = 200  # of each


def random_questions(number: int = NUM_TEXTS) -> list[Question]:
    """Questions that say nothing: their ids stand for them."""
    return [Question(index, "random", ("",)) for index in range(number)]


def random_prompts(tokenizer: Any, number: int, *, seed: int) -> list[tuple[Question, Any]]:
    """Each with its ids (1, L), drawn evenly from the vocabulary, special ones left out."""
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    generator = torch.Generator().manual_seed(seed)
    return [
        (question, ordinary[torch.randint(len(ordinary), (1, _NUM_TOKENS), generator=generator)])
        for question in random_questions(number)
    ]


class RandomPrompter(Prompter):
    """Puts a random text in the place of each question."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self.format = "random"
        prompts = random_prompts(tokenizer, NUM_TEXTS, seed=seed)
        self._ids = {question.id: ids[0].tolist() for question, ids in prompts}

    def prompt_ids(self, question: Question, answers: Sequence[str]) -> list[int]:
        """The same ids whatever was said."""
        return list(self._ids[question.id])

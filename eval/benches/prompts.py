"""From the options of a command to the prompts that it answers: the measuring set, encoded."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question, Slice, select
from eval.benches.registry import load_bench
from eval.errors import EvalError
from eval.options import MAX_PROMPT_TOKENS

Prompts = list[tuple[Question, torch.Tensor]]  # Each with its ids, (1, L).


def load_questions(options: argparse.Namespace, tokenizer: Any) -> Prompts:
    """The first turns of the questions that the options name, those that are too long left out."""
    asked = Slice(options.task, options.every, options.offset)
    prompter, prompts = Prompter(tokenizer), []
    for question in select(load_bench("spec-bench", options.questions).questions, asked):
        ids = prompter.prompt_ids(question, [])
        if len(ids) <= MAX_PROMPT_TOKENS:
            prompts.append((question, torch.tensor([ids])))
    if not prompts[: options.limit]:
        raise EvalError(
            f"{options.questions} must leave a question at least (got none with "
            f"--offset {options.offset} --every {options.every} --limit {options.limit})"
        )
    return prompts[: options.limit]

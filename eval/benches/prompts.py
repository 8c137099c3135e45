"""From the options of a command to the prompts that it answers: the measuring set, encoded."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question, every_nth, of_task, read_questions
from eval.benches.random_text import random_prompts
from eval.errors import EvalError

EVERY = 10  # of a task's questions the 1st, 11th, 21st, … are measured
MAX_PROMPT_TOKENS = 1300
_NUM_RANDOM = 20  # texts, where nobody says how many

Prompts = list[tuple[Question, torch.Tensor]]  # each with its ids, (1, L)


def load_prompts(options: argparse.Namespace, tokenizer: Any) -> Prompts:
    """What `--text` names."""
    if options.text == "random":
        return random_prompts(tokenizer, options.limit or _NUM_RANDOM, seed=options.seed)
    return load_questions(options, tokenizer)


def load_questions(options: argparse.Namespace, tokenizer: Any) -> Prompts:
    """Those of `--questions` that `--task`, `--offset`, `--every` leave; the first `--limit`."""
    if options.questions is None:
        raise EvalError("--questions must name Spec-Bench's question.jsonl (got none)")
    questions = of_task(read_questions(options.questions), options.task)
    prompts = measuring_set(tokenizer, questions, offset=options.offset, every=options.every)
    if not prompts[: options.limit]:
        raise EvalError(
            f"{options.questions} must leave a question at least (got none with "
            f"--offset {options.offset} --every {options.every} --limit {options.limit})"
        )
    return prompts[: options.limit]


def measuring_set(
    tokenizer: Any, questions: Iterable[Question], *, offset: int = 0, every: int = EVERY
) -> Prompts:
    """Every tenth question of each task, from its first on, whose prompt is not too long.

    `offset` picks other tenths, for tuning on questions that nothing is measured on; `every`
    takes more or fewer than a tenth. Of several turns only the first one counts.
    """
    prompter = Prompter(tokenizer)
    chosen = every_nth(questions, offset=offset, every=every)
    encoded = ((question, prompter.prompt_ids(question, [])) for question in chosen)
    return [
        (question, torch.tensor([ids]))
        for question, ids in encoded
        if len(ids) <= MAX_PROMPT_TOKENS
    ]

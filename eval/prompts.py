"""From the options of a command to a model, and to the prompts that it answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

from eval.errors import EvalError
from eval.grow import grow
from eval.questions import Question, measuring_set, of_task, read_questions
from eval.shapes import SHAPES

__all__ = [
    "TEXTS",
    "Prompts",
    "add_model_options",
    "add_prompt_options",
    "load_model",
    "load_prompts",
    "load_questions",
    "random_prompts",
]

TEXTS = ("questions", "random")
_NUM_RANDOM = 20  # texts, where nobody says how many
_NUM_RANDOM_TOKENS = 200  # of such a text

Prompts = list[tuple[Question, torch.Tensor]]  # each with its ids, (1, L)


def load_model(name: str, *, dtype: str, device: str, shape: str | None = None) -> Any:
    """The model of a folder or Hub id, grown to a shape where one is named."""
    held = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=held)
    if shape is not None:
        model = grow(model, shape, device=device)
    return model.to(device).eval()


def load_questions(options: argparse.Namespace, tokenizer: Any) -> Prompts:
    """Those of `--questions` that `--task`, `--offset`, `--every` and `--limit` leave."""
    questions = of_task(read_questions(options.questions), options.task)
    prompts = measuring_set(tokenizer, questions, offset=options.offset, every=options.every)
    if not prompts[: options.limit]:
        raise EvalError(
            f"{options.questions} must leave a question at least (got none with "
            f"--offset {options.offset} --every {options.every} --limit {options.limit})"
        )
    return prompts[: options.limit]


def load_prompts(options: argparse.Namespace) -> Prompts:
    """What `--text` names, as the model's tokenizer has it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    if options.text == "random":
        return random_prompts(tokenizer, options.limit or _NUM_RANDOM, seed=options.seed)
    if options.questions is None:
        raise EvalError("--questions must name Spec-Bench's question.jsonl (got none)")
    return load_questions(options, tokenizer)


def random_prompts(tokenizer: Any, num_prompts: int, *, seed: int) -> Prompts:
    """Ids drawn evenly from the vocabulary, special ones left out: text that nobody can guess."""
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in special])
    generator = torch.Generator().manual_seed(seed)
    texts = (
        ordinary[torch.randint(len(ordinary), (1, _NUM_RANDOM_TOKENS), generator=generator)]
        for _ in range(num_prompts)
    )
    return [(Question(number, "random", ()), ids) for number, ids in enumerate(texts)]


def add_prompt_options(option: Any) -> None:
    """Which prompts are answered, and how long an answer may be."""
    text = f"random: {_NUM_RANDOM} texts (or --limit) of 200 random tokens, which nobody can guess"
    option("--text", choices=TEXTS, default="questions", help=text)
    option("--questions", type=Path, metavar="FILE", help="Spec-Bench question.jsonl")
    option("--task", metavar="NAME", help="questions of this task alone")
    every = "every N-th question of each task; default: 10, the measuring set"
    option("--every", type=int, default=10, metavar="N", help=every)
    option("--offset", type=int, default=0, metavar="K", help="from the K-th on; default: 0")
    option("--limit", type=int, metavar="N", help="the first N prompts; default: all")
    option("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    option("--seed", type=int, default=0, metavar="N", help="of random texts and draws; default: 0")


def add_model_options(option: Any) -> None:
    """Which model answers, grown or not, and where. Its dtype is up to the command."""
    option("--model", required=True, metavar="PATH", help="model id or folder")
    option("--shape", choices=sorted(SHAPES), help="grow the model, a small Llama, to this shape")
    option("--device", default="cpu", help="cpu, cuda, cuda:1, …; default: cpu")

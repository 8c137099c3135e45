"""Where a step's time goes, and what drafting gains over stock, on a model of real cost.

    python -m eval.bench_step --model PATH --questions question.jsonl --shape 135m --max-nodes 16

Stock and selfspec answer the same questions in turn, in one run, after a warm-up. The share of
each stage is its part of the decoding time, the prompt's forward left out. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers

import selfspec
from eval.grow import grow
from eval.questions import Question, measuring_set, read_questions
from eval.setup import machine, quieten, sampling, versions
from eval.shapes import SHAPES
from selfspec.config import BUDGETS
from selfspec.records import GenerationStats

STAGES = ("draft", "layout", "forward", "verify", "commit", "learn")


class Answer(NamedTuple):
    """One question answered by stock and by selfspec."""

    task: str
    num_new_tokens: int
    stock_seconds: float
    selfspec_seconds: float
    same: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Answers the questions, prints both tables and the JSON line."""
    options = _options(argv)
    quieten()
    torch.set_num_threads(options.threads)
    model = _model(options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    prompts = measuring_set(tokenizer, read_questions(options.questions))[: options.limit]
    spec = selfspec.SelfSpec(max_nodes=options.max_nodes, budget=options.budget)
    _answer(model, spec, prompts[0], options)  # warms up; what it taught is forgotten
    spec.forget()
    spec.total_stats = GenerationStats()
    answers = []
    for prompt in prompts:
        answers.append(_answer(model, spec, prompt, options))
        print(_answer_line(answers[-1]), flush=True)
    print(_stage_table(spec.total_stats))
    print(json.dumps(_summary(options, model, spec.total_stats, answers)))
    return 0


def _model(options: argparse.Namespace) -> Any:
    dtype = getattr(torch, options.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    if options.shape is not None:
        model = grow(model, options.shape)
    return model.to(options.device).eval()


def _answer(
    model: Any, spec: Any, prompt: tuple[Question, torch.Tensor], options: argparse.Namespace
) -> Answer:
    """Stock first, then selfspec, with the same seed."""
    question, ids = prompt[0], prompt[1].to(model.device)

    def generate(**kwargs: Any) -> torch.Tensor:
        torch.manual_seed(options.seed)
        out: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.max_new_tokens,
            **sampling(options.temperature),
            **kwargs,
        )
        return out

    stock, stock_seconds = _timed(generate, model.device)
    ours, our_seconds = _timed(lambda: generate(custom_generate=spec), model.device)
    num_new = stock.shape[1] - ids.shape[1]
    return Answer(question.task, num_new, stock_seconds, our_seconds, torch.equal(stock, ours))


def _timed(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    _synchronise(device)
    start = perf_counter()
    out = run()
    _synchronise(device)
    return out, perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _answer_line(answer: Answer) -> str:
    speed_up = answer.stock_seconds / answer.selfspec_seconds
    same = "same text" if answer.same else "TEXT DIFFERS"
    return (
        f"{answer.task:<16} {answer.num_new_tokens:>4} tokens  stock {answer.stock_seconds:6.2f} s"
        f"  selfspec {answer.selfspec_seconds:6.2f} s  {speed_up:.2f}x  {same}"
    )


def _stage_table(stats: GenerationStats) -> str:
    total = sum(stats.seconds[stage] for stage in STAGES)
    lines = [f"{stats.num_steps} steps, {stats.nodes_per_step:.1f} nodes, ms a step and share:"]
    for stage in STAGES:
        seconds = stats.seconds[stage]
        per_step = 1000 * seconds / max(stats.num_steps, 1)
        lines.append(f"  {stage:<8} {per_step:8.3f} ms {seconds / total:7.2%}")
    lines.append(f"  all but the forward {stats.overhead:.2%}")
    return "\n".join(lines)


def _summary(
    options: argparse.Namespace, model: Any, stats: GenerationStats, answers: list[Answer]
) -> dict[str, Any]:
    speed_ups = [answer.stock_seconds / answer.selfspec_seconds for answer in answers]
    steps = max(stats.num_steps, 1)
    return {
        "bench": "bench_step",
        "model": Path(options.model).name,
        "shape": options.shape,
        "dtype": options.dtype,
        "device": options.device,
        "threads": options.threads,
        "machine": machine(options.device),
        "num_cpus": os.cpu_count(),
        "max_nodes": options.max_nodes,
        "budget": options.budget,
        "temperature": options.temperature,
        "attention": model.config._attn_implementation,
        **versions(),
        "num_prompts": len(answers),
        "num_same": sum(answer.same for answer in answers),
        "tokens_per_step": round(stats.tokens_per_step, 3),
        "nodes_per_step": round(stats.nodes_per_step, 1),
        "stage_ms": {s: round(1000 * stats.seconds[s] / steps, 3) for s in STAGES},
        "overhead": round(stats.overhead, 4),
        "speed_up": {
            "total": round(
                sum(a.stock_seconds for a in answers) / sum(a.selfspec_seconds for a in answers), 3
            ),
            "median": round(statistics.median(speed_ups), 3),
            "min": round(min(speed_ups), 3),
            "max": round(max(speed_ups), 3),
        },
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="model id or folder of a small Llama")
    parser.add_argument("--questions", required=True, type=Path, help="Spec-Bench question.jsonl")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="grow the model to this shape")
    parser.add_argument("--max-nodes", type=int, default=16)
    parser.add_argument("--budget", choices=BUDGETS, default="fixed", help="or what pays here")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None, help="answer the first N questions")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""Drafters inside vLLM: tokens per step of each on the same questions, greedily answered.

    python -m eval bench_vllm --model PATH --questions question.jsonl --at-once 1 8

Each drafter answers all questions with an engine and a process of its own. "none" drafts nothing,
and the others' texts are compared with its texts. "ngram" and "suffix" are vLLM's own; "suffix"
needs the package arctic-inference. "suffix-long" is the same with longer drafts than it makes by
itself. "selfspec" starts with --cache and --remember, or knows nothing.
Tokens per step are those that a row gets in a step, the first token of an answer left out. Seconds
are those of all answers, the prompts' included. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter
from typing import Any

from eval.benches.prompts import load_questions
from eval.models.loading import load_tokenizer
from eval.options import EVERY, add_questions, check_at_least
from eval.report.table import Table
from eval.runs.environment import told
from selfspec.engines.vllm import config

_OVERALL = "overall"
METHODS = ("none", "ngram", "suffix", "suffix-long", "selfspec")
# By itself, "suffix" drafts as many tokens as the match has, down to a chance of 0.1.
_LONG = {"suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_min_token_prob": 0.02}


def run(options: argparse.Namespace) -> int:
    """Lets each method answer, for each number of rows, and prints a table."""
    check_at_least(options, 1, "at_once", "max_new_tokens", "tokens")
    questions = load_questions(options, load_tokenizer(options.model))
    tasks = [question.task for question, _ in questions]
    prompts = [input_ids[0].tolist() for _, input_ids in questions]
    found = []
    for at_once in options.at_once:
        answers = {name: answered(name, prompts, at_once, options) for name in options.methods}
        plain = answers.get("none", next(iter(answers.values())))
        for name, answer in answers.items():
            same = sum(a == b for a, b in zip(answer["texts"], plain["texts"], strict=True))
            found.append(
                {"method": name, "at_once": at_once, **figures(answer, tasks), "same": same}
            )
    print(_table(found, len(prompts)).markdown())
    print(json.dumps(told("bench_vllm", options, num_prompts=len(prompts), rows=found)))
    return 0


def arguments_of(name: str, options: Any) -> dict[str, Any]:
    """How vLLM is told to draft by a method."""
    if name == "none":
        return {}
    if name == "selfspec":
        return config(cache=options.cache, remember=options.remember, tokens=options.tokens)
    own = {"method": name, "num_speculative_tokens": options.tokens}
    if name == "ngram":
        shortest = {"prompt_lookup_min": options.ngram_min, "prompt_lookup_max": 5}
        return {"speculative_config": {**own, **shortest}}
    if name == "suffix-long":
        return {"speculative_config": {**own, **_LONG, "method": "suffix"}}
    return {"speculative_config": own}


def answered(name: str, prompts: list[list[int]], at_once: int, options: Any) -> dict[str, Any]:
    """What `answer` finds in a process of its own, which gives all memory back."""
    arguments = {
        "model": options.model,
        "dtype": options.dtype,
        "max_num_seqs": at_once,
        "max_model_len": max(map(len, prompts)) + options.max_new_tokens + options.tokens + 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **arguments_of(name, options),
    }
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as process:
        return process.submit(answer, prompts, options.max_new_tokens, arguments).result()


def answer(prompts: list[list[int]], max_new_tokens: int, arguments: dict[str, Any]) -> Any:
    """The new tokens of each step of each row, and the seconds of all."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # It logs to where the table is printed.
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(**arguments).llm_engine
    asked = SamplingParams(
        temperature=0, max_tokens=max_new_tokens, output_kind=RequestOutputKind.DELTA
    )
    steps: dict[int, list[list[int]]] = defaultdict(list)
    start = perf_counter()
    for index, prompt_ids in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt_ids}, asked)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if new_ids := list(output.outputs[0].token_ids):
                steps[int(output.request_id)].append(new_ids)
    seconds = perf_counter() - start
    taken = [steps[index] for index in range(len(prompts))]
    texts = [[token for new_ids in each for token in new_ids] for each in taken]
    return {"texts": texts, "num_steps": [len(each) - 1 for each in taken], "seconds": seconds}


def figures(answer: dict[str, Any], tasks: list[str]) -> dict[str, Any]:
    """Tokens per step, by task and of all, and the seconds."""
    totals: dict[str, list[int]] = {task: [0, 0] for task in (*tasks, _OVERALL)}
    for task, text, num_steps in zip(tasks, answer["texts"], answer["num_steps"], strict=True):
        for key in (task, _OVERALL):
            totals[key][0] += len(text) - 1
            totals[key][1] += num_steps
    per_step = {key: round(tokens / max(steps, 1), 3) for key, (tokens, steps) in totals.items()}
    return {"tokens_per_step": per_step, "seconds": round(answer["seconds"], 1)}


def _table(found: list[dict[str, Any]], num_prompts: int) -> Table:
    tasks = list(found[0]["tokens_per_step"])
    rows = [
        [
            f"{row['at_once']}",
            row["method"],
            *(f"{row['tokens_per_step'][task]:.2f}" for task in tasks),
            f"{row['seconds']:.1f}",
            f"{row['same']} of {num_prompts}",
        ]
        for row in found
    ]
    title = "Tokens per step inside vLLM"
    return Table(title, ["rows", "drafter", *tasks, "seconds", "same text"], rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_questions(parser, limit="the first N prompts")
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help="folder or Hub id")
    add("--dtype", default="float32", help="default: %(default)s")
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    add("--at-once", nargs="+", type=int, default=[1], metavar="N", help="rows; default: 1")
    add("--tokens", type=int, default=8, metavar="N", help="the longest draft; default: 8")
    shortest = "the shortest match of 'ngram'; default: 2"
    add("--ngram-min", type=int, default=2, metavar="N", help=shortest)
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add("--cache", metavar="CACHE", help="of 'selfspec': a cache or Hub id; default: none")
    add("--remember", metavar="FILE", help="of 'selfspec': keep in this file what is learned")
    parser.set_defaults(every=EVERY)

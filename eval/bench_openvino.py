"""The same prompts by stock, by selfspec and by OpenVINO, in turns.

    python -m venv openvino && openvino/bin/pip install 'optimum-intel[openvino]' openvino-genai
    openvino/bin/optimum-cli export openvino --model PATH --weight-format int8 EXPORTED
    python -m eval bench_openvino --model PATH --exported EXPORTED --python openvino/bin/python \
        --questions question.jsonl --limit 8 --max-new-tokens 64 --dtype bfloat16

OpenVINO asks for other versions of transformers, so it has an environment of its own. All methods
write as many tokens, whatever rounding makes of the texts. The first prompt is answered once
more in front, and that doesn't count. With --weights int8, selfspec's model is in 8 bits too, and
stock runs it without drafts. Printed are whole answers, prompts included. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eval.benches.prompts import load_questions
from eval.errors import EvalError
from eval.methods import openvino_job
from eval.methods.names import OURS, STOCK
from eval.models.loading import load_asked, load_tokenizer
from eval.options import (
    EVERY,
    add_drafting,
    add_length,
    add_model,
    add_questions,
    check_at_least,
    checked_knobs,
)
from eval.report.table import Table
from eval.runs.environment import told
from eval.runs.turns import in_turns
from selfspec import SelfSpec, attach

OTHER = "openvino"
_COLUMNS = {
    "method": "{name}",
    "seconds": "{seconds:.1f}",
    "ms a token": "{each:.1f}",
    "times OpenVINO's": "{ratio:.2f}",
}

Answer = Callable[[list[int]], tuple[float, int]]  # The seconds, and how many tokens it has.


def run(options: argparse.Namespace) -> int:
    """Answers all prompts, and prints a table and the JSON line."""
    knobs = checked_knobs(options)
    check_at_least(options, 1, "max_new_tokens")
    for name in ("exported", "python"):
        if not getattr(options, name).exists():
            raise EvalError(f"--{name} must be there (got {getattr(options, name)})")
    prompts = [ids[0].tolist() for _, ids in load_questions(options, load_tokenizer(options.model))]
    model = attach(load_asked(options, options.weights))
    model.generation_config.eos_token_id = None
    spec = SelfSpec(**knobs)
    with _openvino(options) as (other, version):
        plain = _of_model(model, options.max_new_tokens)
        ours = _of_model(model, options.max_new_tokens, assistant=spec)
        methods = {STOCK: plain, OURS: ours, OTHER: other}
        left = {name: iter([prompts[0], *prompts]) for name in methods}
        answers = in_turns(
            list(methods),
            1 + len(prompts),
            lambda name: methods[name](next(left[name])),
            lambda answer: f"{answer[0]:.2f} s",
        )
    found = {name: each[1:] for name, each in answers.items()}
    seconds = {name: sum(taken for taken, _ in each) for name, each in found.items()}
    rows = [
        {
            "name": name,
            "seconds": taken,
            "each": 1e3 * taken / sum(many for _, many in found[name]),
            "ratio": taken / seconds[OTHER],
        }
        for name, taken in seconds.items()
    ]
    note = f"{len(prompts)} prompts; {spec.total_stats.tokens_per_step:.2f} tokens a step"
    print(Table.of("Beside OpenVINO", _COLUMNS, rows, note).markdown())
    told_too = {"openvino": version, "num_prompts": len(prompts), "rows": rows}
    print(json.dumps(told("bench_openvino", options, **told_too)))
    return 0


def _of_model(model: Any, max_new_tokens: int, **how: Any) -> Answer:
    def answer(ids: list[int]) -> tuple[float, int]:
        inputs, start = torch.tensor([ids]), perf_counter()
        asked = {"max_new_tokens": max_new_tokens, "do_sample": False, **how}
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **asked)
        return perf_counter() - start, output.shape[1] - len(ids)

    return answer


@contextmanager
def _openvino(options: argparse.Namespace) -> Iterator[tuple[Answer, str]]:
    """What answers with OpenVINO, and its version."""
    command = [options.python, openvino_job.__file__, options.exported]
    command += [options.max_new_tokens, options.threads]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), **pipes) as process:  # type: ignore[call-overload]

        def said() -> Any:
            if not (line := process.stdout.readline()):
                raise EvalError(f"{options.python} must run OpenVINO GenAI; it says why above")
            return json.loads(line)

        def answer(ids: list[int]) -> tuple[float, int]:
            print(json.dumps(ids), file=process.stdin, flush=True)
            result = said()
            return result["seconds"], len(result["ids"])

        version = said()["version"]
        yield answer, version


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which model, which prompts, and where OpenVINO is."""
    add = parser.add_argument
    add_model(parser, required=True, dtype="float32", device="cpu")
    rounded = "int8: selfspec's model in 8 bits too; stock runs it without drafts"
    add("--weights", choices=["int8"], help=rounded)
    exported = "the same model as optimum-cli has exported it"
    add("--exported", type=Path, required=True, metavar="FOLDER", help=exported)
    python = "the Python of the environment that has OpenVINO"
    add("--python", type=Path, required=True, metavar="FILE", help=python)
    add_questions(parser, "the first N prompts", every=EVERY)
    add_length(parser, 64)
    add_drafting(parser)

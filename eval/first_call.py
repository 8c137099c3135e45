"""What a user waits for the very first answer: stock's, and selfspec's with an empty home.

    python -m eval first_call --model PATH --dtype bfloat16 --max-new-tokens 32 --rounds 5

Each call has a new process, and folders for home, caches and temporary files in which there is
nothing. It loads the model and answers one short question greedily. Only the `generate()` call
counts: loading the model and importing selfspec are listed apart. Both methods take turns in
going first, after one round that doesn't count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question
from eval.methods.jobs import in_new_process
from eval.methods.one_call import Job, Result
from eval.models.loading import load_tokenizer
from eval.options import add_drafting, check_at_least, checked_knobs
from eval.report.table import Table
from eval.runs.environment import told

_METHODS = ("stock", "selfspec")
_PROMPT = (
    "A friend wants to learn to cook. Name five simple dishes for a beginner, and say in one "
    "sentence each why it is a good start."
)

_COLUMNS = {
    "method": "{name}",
    "first call, s": "{call_seconds:.2f}",
    "least": "{least:.2f}",
    "most": "{most:.2f}",
    "times stock's": "{ratio:.2f}",
    "loading, s": "{load_seconds:.2f}",
    "imports, s": "{import_seconds:.2f}",
}
Results = dict[str, list[Result]]  # of each method, in the order of the rounds


def run(options: argparse.Namespace) -> int:
    """Measures all rounds, and prints a table and the JSON line."""
    check_at_least(options, 1, "rounds")
    knobs = checked_knobs(options)
    prompter = Prompter(load_tokenizer(options.model))
    prompt_ids = prompter.prompt_ids(Question(0, "first call", (options.prompt,)), [])
    own = {name: getattr(options, name) for name in ("max_new_tokens", "dtype", "threads")}
    model = str(Path(options.model).expanduser().resolve())
    job = Job(model=model, method="", prompt_ids=prompt_ids, knobs=knobs, **own)
    results: Results = {name: [] for name in _METHODS}
    for number in range(options.rounds + 1):
        for name in _METHODS[:: 1 if number % 2 else -1]:
            result = _call(job._replace(method=name))
            counts = number > 0
            note = "" if counts else " (doesn't count)"
            print(f"round {number}: {name} {result.call_seconds:.2f} s{note}", flush=True)
            if counts:
                results[name].append(result)
    print(_table(results).markdown())
    for note in _notes(results):
        print(note)
    found = {
        "knobs": knobs,
        "ratio": round(_ratio(results), 3),
        "ratios": [round(each, 3) for each in _ratios(results)],
        "seconds": {n: [round(r.call_seconds, 3) for r in each] for n, each in results.items()},
        "import_seconds": round(_median(results["selfspec"], "import_seconds"), 3),
        "same_text": results["selfspec"][-1].new_ids == results["stock"][-1].new_ids,
    }
    print(json.dumps(told("first_call", options, **found)))
    return 0


def _call(job: Job) -> Result:
    """Runs a job in a new process that finds nothing of an earlier one."""
    with TemporaryDirectory() as folder:
        empty = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), folder)
        what, env = f"the call of {job.method!r} failed", {**os.environ, **empty}
        return Result(**in_new_process("eval.methods.one_call", job, what, env))


def _table(results: Results) -> Table:
    """A row for each method: the call, its ratio to stock's, and what doesn't count."""
    rows = []
    for name, found in results.items():
        seconds = [each.call_seconds for each in found]
        medians = {part: _median(found, part) for part in Result._fields[:3]}
        ratio = None if name == "stock" else _ratio(results)
        rows.append(
            {**medians, "name": name, "least": min(seconds), "most": max(seconds), "ratio": ratio}
        )
    return Table.of("First call with an empty home", _COLUMNS, rows, "Medians over the rounds.")


def _median(found: Sequence[Result], part: str) -> float:
    return median(getattr(each, part) for each in found)


def _ratio(results: Results) -> float:
    ours, stock = (_median(results[name], "call_seconds") for name in ("selfspec", "stock"))
    return ours / stock


def _ratios(results: Results) -> list[float]:
    pairs = zip(results["selfspec"], results["stock"], strict=True)
    return [ours.call_seconds / stock.call_seconds for ours, stock in pairs]


def _notes(results: Results) -> list[str]:
    ours, stock = (results[name][-1] for name in ("selfspec", "stock"))
    notes = []
    if len(ours.new_ids) != len(stock.new_ids):
        notes.append(
            f"The texts have other lengths: selfspec's {len(ours.new_ids)} tokens, stock's "
            f"{len(stock.new_ids)}."
        )
    if ours.disabled_reason:
        notes.append(f"selfspec did not draft as asked: {ours.disabled_reason}.")
    return notes


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="a model's folder")
    add("--dtype", default="auto", help="float32, bfloat16, float16; auto: the checkpoint's")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=5, metavar="N", help="calls of each; default: %(default)s")
    add("--threads", type=int, metavar="N", help="of the CPU; default: torch's own number")
    add("--prompt", default=_PROMPT, help="what is asked; default: a question about cooking")
    add_drafting(parser)

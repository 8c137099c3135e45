"""What a user waits for the very first answer: stock's, and selfspec's with an empty home.

    python -m eval first_call --model PATH --dtype bfloat16 --max-new-tokens 32 --rounds 5

Each call has a new process, and folders for home, caches and temporary files in which there is
nothing. It loads the model and answers one short question greedily. Only the `generate()` call
counts: loading the model and importing selfspec are listed apart. Both methods take turns in
going first, and the first round doesn't count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from eval.benches.dialogue import Prompter
from eval.benches.questions import Question
from eval.jobs.one_call import Job, Result
from eval.jobs.start import in_new_process
from eval.methods.names import OURS, STOCK
from eval.models.loading import load_tokenizer
from eval.options import add_drafting, add_length, check_at_least, checked_knobs
from eval.report.table import Table
from eval.runs.environment import tell
from eval.runs.turns import in_turns

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


def run(options: argparse.Namespace) -> int:
    """Measures all rounds, and prints a table and the JSON line."""
    check_at_least(options, 1, "rounds")
    knobs = checked_knobs(options)
    prompter = Prompter(load_tokenizer(options.model))
    prompt_ids = prompter.prompt_ids(Question(0, "first call", (options.prompt,)), [])
    own = {name: getattr(options, name) for name in ("max_new_tokens", "dtype", "threads")}
    model = str(Path(options.model).expanduser().resolve())
    job = Job(model=model, method="", prompt_ids=prompt_ids, knobs=knobs, **own)
    all_rounds = in_turns(
        (STOCK, OURS),
        options.rounds + 1,
        lambda name: _call(job._replace(method=name)),
        lambda each: f"{each.call_seconds:.2f} s",
    )
    results = {name: results[1:] for name, results in all_rounds.items()}
    seconds = {name: [result.call_seconds for result in found] for name, found in results.items()}
    ratio = median(seconds[OURS]) / median(seconds[STOCK])
    rows = [
        {
            **{
                part: median(getattr(result, part) for result in found)
                for part in Result._fields[:3]
            },
            **{"name": name, "least": min(seconds[name]), "most": max(seconds[name])},
            "ratio": None if name == STOCK else ratio,
        }
        for name, found in results.items()
    ]
    title, note = "First call with an empty home", _note(results[OURS], results[STOCK])
    print(Table.of(title, _COLUMNS, rows, note).markdown())
    pairs = zip(seconds[OURS], seconds[STOCK], strict=True)
    found = {
        "knobs": knobs,
        "ratio": round(ratio, 3),
        "ratios": [round(ours / stock, 3) for ours, stock in pairs],
        "seconds": {name: [round(s, 3) for s in spent] for name, spent in seconds.items()},
        "import_seconds": round(rows[-1]["import_seconds"], 3),
        "same_text": results[OURS][-1].new_ids == results[STOCK][-1].new_ids,
    }
    return tell("first_call", options, **found)


def _call(job: Job) -> Result:
    """Runs a job in a new process that finds nothing of an earlier one."""
    with TemporaryDirectory() as folder:
        empty = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), folder)
        what, env = f"the call of {job.method!r} failed", {**os.environ, **empty}
        return Result(**in_new_process("eval.jobs.one_call", job, what, env))


def _note(ours: Sequence[Result], stock: Sequence[Result]) -> str:
    """What a reader of the table has to know."""
    notes, lengths = ["Medians over the rounds."], [len(each[-1].new_ids) for each in (ours, stock)]
    if lengths[0] != lengths[1]:
        notes.append("The texts have {} tokens of selfspec's, {} of stock's.".format(*lengths))
    if reason := ours[-1].disabled_reason:
        notes.append(f"selfspec did not draft in trees: {reason}.")
    return " ".join(notes)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="a model's folder")
    add("--dtype", default="auto", help="float32, bfloat16, float16; auto: the checkpoint's")
    add_length(parser, 32)
    add("--rounds", type=int, default=5, metavar="N", help="calls of each; default: %(default)s")
    add("--threads", type=int, metavar="N", help="of the CPU; default: torch's own number")
    add("--prompt", default=_PROMPT, help="what is asked; default: a question about cooking")
    add_drafting(parser)

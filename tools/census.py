"""Which families of models are drafted for: one small random model of each that is installed.

    python -m tools.census --output FOLDER [--families llama qwen2_vl]

Each family's config is shrunk until a model of it is made in a moment. It answers with stock's loop
and with drafts that are partly right, with an image or a sound in the prompt where the family takes
one: greedily, sampled, a padded batch of two, three samples of one prompt, two turns over one KV
cache, and a prompt in chunks. A line each says whether drafts are trees or chains, or why there are
none. "wrong text", "error" and "no draft accepted" are faults of selfspec, and make the exit status
1. "not made" and "image not made" say that no such model or prompt could be had here. Each family
has a process and --seconds of its own. What is in --output is not tried again; families.md there is
a table of all, and verdicts.jsonl has the whole reasons. Those that docs/works-with.md shows are in
tools/census_families.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import transformers

from eval.errors import EvalError, exit_status
from eval.options import check_at_least
from tools.census_families.shrink import all_families
from tools.census_families.trial import FAULTS, Verdict, verdict

KEPT = Path(__file__).parent / "census_families" / "verdicts.jsonl"  # What the page shows.
PAGE = Path(__file__).parents[1] / "docs" / "works-with.md"  # Its last part is made here.
_TITLE = "## All families of models\n"
_INTRODUCTION = (
    "What `python -m tools.census` found for each of the {number} families of models that write "
    "text in transformers {version}. A small random model of each answered with transformers' own "
    "loop and with drafts, with an image or a sound in its prompt where it takes one. A random "
    "model shows whether the texts are the same, and nothing about speed. Plain calls are decoded "
    "as without selfspec."
)
_HEAD = "\n| drafts | which models | model types |\n|---|---|---|"
_NOT_TRIED = "no small model of it could be made here, which says nothing about selfspec"
_ALONE = "; no {} could be made here, so only the rest was tried"
# What reasons mean, by words in them. Other reasons are shown as they are.
_MEANINGS = {
    "encoder-decoder": "encoder-decoders",
    "fails": "its code takes one token at a time",
    "which can't branch": "its layers can't take several guesses for one place",
    "KV layer": "its layers share keys and values, or keep them in a cache of their own",
    "given no positions": "its plain steps are given no positions",
    "window of the model's own": "it has a window of its own making",
    "running states": "its running states are moved on by code of its own",
    "keeps a state of its own": "recurrent models, which have a state in place of a KV cache",
    "strongest columns": "its attention keeps the strongest tokens alone",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="where verdicts are kept")
    add("--families", nargs="+", metavar="NAME", help="these model types alone; default: all")
    seconds = "of the processor for each family; default: %(default)s"
    add("--seconds", type=int, default=60, metavar="N", help=seconds)


def run(options: argparse.Namespace) -> int:
    """The exit status: 1 where selfspec has a fault."""
    check_at_least(options, 1, "seconds")
    families = options.families or sorted(all_families())
    if unknown := [each for each in families if each not in all_families()]:
        raise EvalError(f"--families must be model types of transformers (got {unknown[0]!r})")
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    found = list(_verdicts(families, options.output / "verdicts.jsonl", options.seconds))
    made = page(found, transformers.__version__)
    (options.output / "families.md").write_text(made, encoding="utf-8")
    counts = dict(Counter(each.served for each in found).most_common())
    print(json.dumps({"bench": "census", "families": len(found), "served": counts}))
    return int(any(each.served in FAULTS for each in found))


def _verdicts(families: list[str], kept: Path, seconds: int) -> Iterator[Verdict]:
    known = {each.family: each for each in read_verdicts(kept)}
    for family in families:
        if family not in known:
            known[family] = _in_process(family, seconds)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[family]._asdict()) + "\n")
        each = known[family]
        print(f"{family:<28} {each.served:<15} {each.prompt:<6} {each.reason}", flush=True)
        yield each


def _in_process(family: str, seconds: int) -> Verdict:
    """A fork, since to import all of it anew would take longer than the trial."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=_send, args=(family, seconds, there), daemon=True)
    worker.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        worker.join()
        if worker.exitcode == -signal.SIGXCPU:
            return Verdict(family, "too slow to try", reason=f"took longer than {seconds} s")
        return Verdict(family, "error", reason=f"its process ended with {worker.exitcode}")
    finally:
        worker.kill()
        worker.join()


def _send(family: str, seconds: int, there: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # A busy machine changes none.
    logging.disable()  # What a library says of odd configs, and selfspec of calls that are plain.
    warnings.simplefilter("ignore")
    there.send(verdict(family))


def read_verdicts(path: Path) -> list[Verdict]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Verdict(**json.loads(line)) for line in lines]


def page(verdicts: list[Verdict], version: str) -> str:
    """All families by how they are served, as a part of the page."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in verdicts:
        rows.setdefault(_row(each), []).append(f"`{each.family}`")
    order = ["trees", "chains", "plain", "refused"]
    served = sorted(rows, key=lambda row: order.index(row[0]) if row[0] in order else len(order))
    lines = [f"| {name} | {which} | {', '.join(rows[name, which])} |" for name, which in served]
    introduction = fill(_INTRODUCTION.format(number=len(verdicts), version=version), width=120)
    return "\n".join([_TITLE, introduction, _HEAD, *lines, ""])


def _row(verdict: Verdict) -> tuple[str, str]:
    """How a family is served, and which models are served so."""
    served, reason, more = verdict.served, verdict.reason, ""
    if served == "not made":
        return "not tried", _NOT_TRIED
    if served == "image not made":
        medium, (served, _, reason) = reason.split(":")[0], _of_text(reason).partition(", ")
        more = _ALONE.format(medium)
    meanings = (meaning for words, meaning in _MEANINGS.items() if words in reason)
    which = next(meanings, reason)
    if served == "trees":
        which = "text" if verdict.prompt == "text" else f"text with {verdict.prompt}"
    return served, f"{which}{more}"


def _of_text(reason: str) -> str:
    """What was found without the image or sound that could not be made."""
    return reason.rpartition("; text alone: ")[2].rpartition("; the other: ")[2]


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__)
    add_options(command)
    sys.exit(exit_status(lambda: run(command.parse_args())))

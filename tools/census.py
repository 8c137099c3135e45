"""Which families of models are drafted for: one small random model of each that is installed.

    python -m tools.census --output FOLDER [--families llama qwen2_vl]

Each family's config is shrunk until a model of it is made in a moment. It answers with stock's loop
and with drafts that are partly right, with an image or a sound in the prompt where the family takes
one: greedily, sampled, a padded batch of two, three samples of one prompt, two turns over one KV
cache, and a prompt in chunks. A line each says whether drafts are trees or chains, or why there are
none. "wrong text", "error" and "no draft accepted" are faults of selfspec, and make the exit status
1. "not made" and "image not made" say that no such model or prompt could be had here. Each family
has a process and --seconds of its own. What is in --output is not tried again; models.md there is a
table of all.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
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

_INTRODUCTION = """# Models

What `python -m tools.census` found for each of the {number} families of models that write text in
transformers {version}. A small random model of each answered with transformers' own loop and with
drafts, with an image or a sound in its prompt where it takes one. A random model shows whether the
texts are the same, and nothing about speed. For your model, run `selfspec check`."""
_MEANINGS = {
    "trees": "Drafts are verified as trees.",
    "chains": "Drafts are verified as chains, which accept a little less in a step.",
    "plain": "Such calls are decoded as without selfspec, with the reason in the statistics.",
    "refused": "The call ends with an error that says why.",
    "image not made": "No image or sound could be made for these here, so only the rest was tried.",
    "not made": "No small model could be made here, or transformers' own loop failed with it. This "
    "says nothing about selfspec.",
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
    (options.output / "models.md").write_text(page(found), encoding="utf-8")
    counts = dict(Counter(each.served for each in found).most_common())
    print(json.dumps({"bench": "census", "families": len(found), "served": counts}))
    return int(any(each.served in FAULTS for each in found))


def _verdicts(families: list[str], kept: Path, seconds: int) -> Iterator[Verdict]:
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    known = {each.family: each for each in (Verdict(**json.loads(line)) for line in lines)}
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


def page(verdicts: list[Verdict]) -> str:
    """All families by how they are served, as a page of the docs."""
    served = dict.fromkeys([*_MEANINGS, *(each.served for each in verdicts)])
    parts = [_INTRODUCTION.format(number=len(verdicts), version=transformers.__version__)]
    for name in served:
        some = [each for each in verdicts if each.served == name]
        if some:
            head = f"## {name.capitalize()} ({len(some)})"
            parts += [head, *([_MEANINGS[name]] if name in _MEANINGS else []), _listed(some)]
    return "\n\n".join(parts) + "\n"


def _listed(verdicts: list[Verdict]) -> str:
    """Names with an equal prompt and an equal reason in one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in verdicts:
        reason = re.sub(r"^\w*(For|LM|Model)\w*(:|(?= ))", "", each.reason).strip()
        reason = reason.removesuffix("; drafting chains instead of trees")
        groups.setdefault((each.prompt, reason), []).append(f"`{each.family}`")
    lines = []
    for (prompt, reason), names in groups.items():
        line = f"- With {prompt}{reason and f': {reason}'}: {', '.join(names)}"
        lines.append(
            fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__)
    add_options(command)
    sys.exit(exit_status(lambda: run(command.parse_args())))

"""The options of `python -m eval`, and what its `--help` says.

Imports nothing heavy, so that help is there at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.errors import EvalError, exit_status
from eval.methods.names import DESCRIPTIONS
from eval.methods.studies import STUDIES

_RUN = """\
Answers the questions of a bench with several decoding methods, question by question in turns, and
writes all that it measured to --output: rows.jsonl, summary.json, report.md and report.html.

  python -m eval run --bench code-stdlib --output out
  python -m eval run --model your/model --bench spec-bench --questions question.jsonl --output out
  torchrun --nproc-per-node 4 -m eval run --device cuda --model your/model --bench mbpp --output out

A run that was stopped goes on where it was when it is started again with the same options; a
higher --limit makes it longer.
"""
_BENCHES = """\
benches:
  spec-bench, mt-bench   their question.jsonl, named by --questions (mt-bench also through datasets)
  humaneval, gsm8k, mbpp through the datasets package, or a local file named by --questions
  code-stdlib            completion, edit and docstring tasks cut from Python's own library, offline
  random                 texts of random tokens, which no draft can guess
  FILE.jsonl             your own: {"turns": ["…", "…"]} or {"prompt": "…"} a line
methods:
"""
_STUDY = """\
Runs one method with different knobs, all of them interleaved as in 'run', and reports on each:

"""
_SIMULATE = """\
Drafts for the texts that a run recorded, step by step, and counts what would have been accepted.
The text stands for the model, so tables learn from its tokens alone, and tokens per step come out
lower than with the model: compare them with each other only. The last line is one JSON object.
"""
_FIT = """\
Answers questions twice, counts how often the candidate at each depth and rank was right, and puts
the tree with the most tokens a second on this machine into a new cache, for --knob budget=fitted.
"""
# Texts keep their lines.
_LINES: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m eval")
    top.description = "Measures decoding methods on a model, a bench and a machine of yours."
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    report = commands.add_parser("report", help="write a run's report anew from its rows")
    report.add_argument("folder", type=Path, help="--output of a run")
    pictures = "also write each picture to this folder, as an SVG file"
    report.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)
    report.set_defaults(command="report")
    compare = commands.add_parser("compare", help="two runs side by side, question by question")
    compare.add_argument("a", type=Path, help="--output of a run")
    compare.add_argument("b", type=Path, help="that of the other one")
    compare.set_defaults(command="compare")
    _add_simulate(commands)
    _add_study(commands)
    _add_fit(commands)
    return top


def command(
    name: str,
    description: str | None,
    add_options: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> Callable[..., int]:
    """The `main` of a command of its own, whose description keeps its lines.

    What the user got wrong is one line and exit status 2.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        program = f"python -m eval.{name}"
        parser = argparse.ArgumentParser(prog=program, description=description, **_LINES)
        add_options(parser)
        options = parser.parse_args(argv)
        return exit_status(lambda: run(options))

    return main


def check_at_least(options: Any, least: float, *names: str) -> None:
    """Refuses an option that is below its least value; one that was not given is left alone."""
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not value >= least:
                raise EvalError(f"--{name.replace('_', '-')} must be >= {least} (got {value})")


def drafting_knobs(options: argparse.Namespace) -> dict[str, Any]:
    """The knobs that were named; all others are `SpecConfig`'s own."""
    named = {"max_nodes": options.max_nodes, "budget": options.budget}
    given = {name: value for name, value in named.items() if value is not None}
    return {**given, **parsed_knobs(options.knob)}


def checked_knobs(options: argparse.Namespace) -> dict[str, Any]:
    """The same, and a wrong one is refused before anything starts."""
    from selfspec.config import SpecConfig

    knobs = drafting_knobs(options)
    SpecConfig.of(**knobs)
    return knobs


def parsed_knobs(knobs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs; values are JSON where they parse as such."""
    parsed: dict[str, Any] = {}
    for knob in knobs:
        name, _, value = knob.partition("=")
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed


def _add_simulate(commands: Any) -> None:
    short = "replay a run's texts through the sources, with no model"
    simulate = commands.add_parser("simulate", help=short, description=_SIMULATE, **_LINES)
    add = simulate.add_argument
    add("folder", type=Path, help="--output of a run")
    add("--max-nodes", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N")
    add("--cache", metavar="CACHE", help="start with this cache or Hub id")
    add_knob(simulate)
    add("--at-least", type=float, metavar="X", help="exit status 1 where any width yields less")
    simulate.set_defaults(command="simulate")


def _add_run(commands: Any) -> None:
    short = "answer a bench with several methods and write a report"
    names = _BENCHES + "\n".join(f"  {name:<16} {line}" for name, line in DESCRIPTIONS.items())
    run = commands.add_parser("run", help=short, description=_RUN, epilog=names, **_LINES)
    _add_bench(run)
    add_methods(run)
    add_run_options(run)
    run.set_defaults(command="run")


def _add_study(commands: Any) -> None:
    short = "make an experiment of the papers on a model of yours"
    names = _STUDY + "\n".join(f"  {n:<9} {s.title} ({s.after})" for n, s in STUDIES.items())
    study = commands.add_parser("study", help=short, description=names, **_LINES)
    study.add_argument("name", help="one of those above")
    caches = "for 'starts': caches or Hub ids to compare"
    study.add_argument("--caches", nargs="+", default=[], metavar="CACHE", help=caches)
    _add_bench(study)
    add_run_options(study)
    study.set_defaults(command="study")


def _add_fit(commands: Any) -> None:
    short = "fit one tree shape to a model and this machine, after Ghidorah"
    fit = commands.add_parser("fit", help=short, description=_FIT, **_LINES)
    add_model(fit)
    add_questions(fit, "the first N prompts")
    add = fit.add_argument
    add("--out", type=Path, required=True, metavar="CACHE", help="a new cache for the tree")
    add("--cache", metavar="CACHE", help="start with what this cache or Hub id holds")
    add("--width", type=int, metavar="N", help="keep this number of nodes; default: the fastest")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    _add_precision(fit)
    fit.set_defaults(command="fit", dtype="float32", device="cpu")


def _add_bench(command: Any) -> None:
    add = command.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="where all results go")
    add("--bench", required=True, help="a bench that 'run' names, or FILE.jsonl")


_METHODS = ("stock", "prompt-lookup", "selfspec")


class _Names(argparse.Action):
    """Names, set apart by commas or spaces."""

    def __call__(self, parser: Any, options: Any, values: Any, option: Any = None) -> None:
        names = (name.strip() for text in values for name in text.split(","))
        setattr(options, self.dest, tuple(name for name in names if name))


def add_methods(command: Any, default: Sequence[str] = _METHODS) -> None:
    command.add_argument(
        "--methods",
        nargs="+",
        action=_Names,
        default=tuple(default),
        metavar="NAME",
        help=f"names with commas or spaces; default: {' '.join(default)}",
    )


_SPREAD = "so many questions, spread over the tasks"


def add_run_options(command: Any, limit: str = _SPREAD) -> None:
    """All that a run can be told but for its bench, its methods and where results go."""
    model = command.add_argument_group("which model")
    add_model(model)
    help_ = "the small model of method 'assisted'"
    model.add_argument("--assistant-model", "--assistant", metavar="MODEL", help=help_)
    _add_precision(model)
    add_questions(command.add_argument_group("which questions"), limit)
    _add_prompts(command.add_argument_group("how they are put"))
    _add_decoding(command.add_argument_group("how they are answered"))
    _add_state(command.add_argument_group("what drafters know, and how they draft"))
    command.set_defaults(in_order=False)


def add_model(group: Any) -> None:
    """Which model, and where. Its dtype is up to the command."""
    add = group.add_argument
    add("--model", help="folder or Hub id; default: the embedded one, which writes Python code")
    shape = "grow a small Llama to this shape first, such as 135m, or 135m:full: see eval.grow"
    add("--shape", help=shape)
    add("--device", default="auto", help="cpu, cuda, …; auto: a GPU if any; default: %(default)s")


def add_required_model(group: Any) -> None:
    """A model that has to be named, and how it is run."""
    add = group.add_argument
    add("--model", required=True, metavar="MODEL", help="folder or Hub id")
    add("--dtype", default="float32", help="default: %(default)s")
    add("--device", default="cpu", help="default: %(default)s")
    add("--threads", type=int, metavar="N", help="of the CPU; default: torch's")


def add_questions(group: Any, limit: str) -> None:
    """A file of questions, and which of them; `limit` says what a number of them takes."""
    add = group.add_argument
    add("--questions", type=Path, metavar="FILE", help="a local file of the bench")
    add("--limit", type=int, metavar="N", help=limit)
    add("--task", help="questions of this task alone")
    every = "every Nth question of each task; default: %(default)s"
    add("--every", type=int, default=1, metavar="N", help=every)
    add("--offset", type=int, default=0, metavar="N", help="which of the N; default: 0")


def add_drafting(group: Any) -> None:
    """The knobs of `SpecConfig`; what is not named is as it has it."""
    add = group.add_argument
    add("--max-nodes", type=int, metavar="N", help="nodes of a draft tree")
    add("--budget", help="measured: as many of --max-nodes as pay; fixed, threshold or fitted")
    add_knob(group)


def add_knob(group: Any) -> None:
    """The knobs that have no option of their own."""
    more = "any other knob of SpecConfig"
    group.add_argument("--knob", nargs="*", default=[], metavar="NAME=VALUE", help=more)


def _add_precision(group: Any) -> None:
    add = group.add_argument
    dtypes = "float32, bfloat16, float16; auto: the checkpoint's own; default: %(default)s"
    add("--dtype", default="auto", help=dtypes)
    add(
        "--threads", type=int, metavar="N", help="of the CPU; default: %(default)s, None is torch's"
    )


def _add_prompts(group: Any) -> None:
    add = group.add_argument
    add("--turns", type=int, metavar="N", help="at most so many; default: %(default)s, None is all")
    longest = "leave longer first prompts out; default: %(default)s"
    add("--max-prompt-tokens", type=int, metavar="N", help=longest)
    formats = "chat: the tokenizer's template. plain: text to go on with. auto: what fits"
    add("--prompt-format", default="auto", help=formats)


def _add_decoding(group: Any) -> None:
    add = group.add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy, the default")
    add("--seed", type=int, default=0, metavar="N", help="question number n gets seed N + n")
    rounds = "answer all so often, from the same state each time; default: %(default)s"
    add("--rounds", type=int, default=1, metavar="N", help=rounds)
    add("--batch-size", type=int, default=1, metavar="N", help="questions answered together")


def _add_state(group: Any) -> None:
    add = group.add_argument
    add("--cache", metavar="CACHE", help="prebuilt state: start with this cache or Hub id")
    add("--warm-up", type=int, default=0, metavar="N", help="answer N other questions first")
    add_drafting(group)

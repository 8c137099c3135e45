"""The commands of `python -m eval`: what each of them does, and how it ends.

What is heavy is imported where a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from eval import options as of
from eval.errors import EvalError, exit_status
from eval.methods.studies import named_study, variants_of
from eval.options import check_at_least

_INTERRUPTED = 130
_EXTRA = ("jinja2", "matplotlib", "pandas")
_WHAT = "Measures decoding methods on a model, a bench and a machine of yours."


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description, and sets names and what they mean side by side."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


class Command(NamedTuple):
    """What it does in a line, its options, and what runs it."""

    line: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; what the user got wrong is one line and exit status 2."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return exit_status(lambda: _done(words))
    except KeyboardInterrupt:
        print("stopped: what is done is kept; the same command goes on", file=sys.stderr)
        return _INTERRUPTED


def _done(words: Sequence[str]) -> int:
    try:
        options = _parser(words).parse_args(words)
        return _command(options.__dict__.pop("command")).run(options)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        fix = "pip install -e '.[eval]'"
        raise EvalError(f"{error.name!r} must be installed for this command: {fix}") from error


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """All commands by name, and the options of the one that was chosen."""
    top = argparse.ArgumentParser(prog="python -m eval", description=_WHAT, formatter_class=_Help)
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        line = command if isinstance(command, str) else command.line
        parser = commands.add_parser(name, help=line, formatter_class=_Help)
        if name == next(iter(words), None):
            _command(name).add_options(parser)
            if of.MEASURING_SET in words:  # Options that are named win over it.
                parser.set_defaults(**of.measuring_set())
    return top


def _command(name: str) -> Command:
    """A module's docstring is its help; it is imported here, and not before."""
    found = COMMANDS[name]
    if isinstance(found, Command):
        return found
    module = import_module(f"eval.{name}")

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.description = module.__doc__
        module.add_options(parser)

    return Command(found, add_options, module.run)


def _study(options: argparse.Namespace) -> int:
    study = named_study(options.name)
    options.study = options.name
    options.variants = variants_of(study, options.caches)
    options.methods = tuple(options.variants)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    from eval.report.pages import write_report
    from eval.report.rows import ROWS
    from eval.report.summary import brief, summary
    from eval.runs.asked import Asked
    from eval.runs.progress import RunProgress
    from eval.runs.run import measure

    if options.bench is None:
        raise EvalError("--bench must name a bench (got none); --help lists them")
    with TemporaryDirectory() as folder:  # For results that nobody keeps.
        options.output, is_kept = options.output or Path(folder), options.output is not None
        asked = Asked.of(options)
        record = measure(asked, asked.output / ROWS, RunProgress(sys.stderr))
        print(write_report(asked.output, record))
    figures = summary(record)
    if is_kept:
        print(f"report: {asked.output / 'report.html'}")
    written = str(asked.output / "summary.json") if is_kept else None
    print(json.dumps({"bench": "run", "summary": written, "overall": brief(figures)}))
    return int(any(name not in figures["left_out"] for name in figures["errors"]))


def _report(options: argparse.Namespace) -> int:
    from eval.report.pages import write_pictures, write_report
    from eval.report.pictures import pictures
    from eval.report.rows import read_answers
    from eval.report.summary import summary

    record = read_answers(options.folder)
    print(write_report(options.folder, record))
    if options.pictures is not None:
        for path in write_pictures(options.pictures, pictures(summary(record), record)):
            print(f"picture: {path}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    from eval.report.compare import compared
    from eval.report.rows import read_answers

    print(compared(read_answers(options.a), read_answers(options.b)))
    return 0


def _fit(options: argparse.Namespace) -> int:
    from eval.fit.tree import run

    check_at_least(options, 2, "width")
    return run(options)


# A line alone is that of a module of this name, which has `add_options` and `run`.
COMMANDS: dict[str, Command | str] = {
    "run": Command("compare methods on your model and your questions", of.add_run, _run),
    "report": Command("write the report of a run again", of.add_report, _report),
    "compare": Command(
        "what changed between two runs, question by question", of.add_compare, _compare
    ),
    "tokens_per_step": "how many tokens a forward yields, by width and source, asked once or again",
    "first_call": "how long the very first call takes",
    "predict": "what right and wrong predictions of edits bring",
    "bench_batch": "many prompts over one model: tokens a second, and how long they wait",
    "bench_server": "the same questions over HTTP, to several servers",
    "bench_kept": "what it brings that keys and values outlive a request",
    "bench_streamed": "a model that does not fit into memory",
    "gpu": "the tables of docs/gpu.md, in one run on a card",
    "nodes": "how long a forward over a tree takes, by its number of nodes",
    "replay": "try sources, knobs and budgets on a run's texts, without the model",
    "functions": "how many functions of selfspec a call goes through",
    "study": Command("an experiment of the papers on your model", of.add_study, _study),
    "fit": Command("fit one shape of trees to a model, after Ghidorah", of.add_fit, _fit),
    "hetero": "a model shared by two cores, after Ghidorah",
    "edge_network": "the edge network of its paper, simulated without a model",
    "grow": "write a bigger model that computes what a small Llama computes",
}

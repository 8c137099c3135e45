"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from selfspec.building.progress import Bars
from selfspec.cli.batch.answerer import Answerer, Outcome
from selfspec.cli.batch.batch_files import Appended, BatchFiles, Errors, Progress
from selfspec.cli.shared.messages import Verbose
from selfspec.cli.shared.opened import checked
from selfspec.cli.shared.options import Knobs, MaxNewTokens, WriteOptions, unfolds


@unfolds
def batch(
    asked: WriteOptions,
    knobs: Knobs,
    prompts: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A file with one prompt a line, in JSON.")
    ],
    answers: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="Append the answers to this file. If it exists, the run is continued.",
        ),
    ],
    max_new_tokens: MaxNewTokens = 256,
    max_rows: Annotated[
        int,
        typer.Option(min=1, help="The largest number of texts that are written at the same time."),
    ] = 8,
    verbose: Verbose = False,
) -> None:
    """Answer a file of prompts. A run that was stopped continues where it was."""
    config = checked(asked, knobs)
    files = BatchFiles(prompts, answers)
    files.check()
    answerer = Answerer(asked, config, max_new_tokens, max_rows)
    with files.locked():
        progress = files.progress()
        if len(progress.done) == progress.total:
            typer.echo(f"All {progress.total} lines are answered in {answers}.", err=True)
            return
        num_bad = _run(files, progress, answerer)
    if num_bad:
        total = progress.total
        typer.echo(f"{num_bad} of {total} lines have no answer; see {files.errors}.", err=True)
        raise typer.Exit(1)


def _run(files: BatchFiles, progress: Progress, answerer: Answerer) -> int:
    """Answers what is left; returns how many lines have no answer in the end."""
    with closing(Errors(files.errors)) as errors:
        for number, why in progress.unreadable.items():
            errors.note(number, why)
        if progress.unreadable:
            count = f"{errors.number} of {progress.total} lines can't be read"
            typer.echo(f"{count}; see {files.errors}.", err=True)
        if not progress.num_open:
            return errors.number
        known = progress.done | progress.unreadable.keys()
        try:
            with answerer.alone() as answers:
                lines = (each for each in files.lines() if each[0] not in known)
                _write(answers(lines), files, errors, len(known), progress.total)
        except KeyboardInterrupt:
            typer.echo("Stopped. The same command goes on from here.", err=True)
            raise
        return errors.number


def _write(
    outcomes: Iterator[Outcome], files: BatchFiles, errors: Errors, num_known: int, total: int
) -> None:
    """Writes down each outcome as it comes."""
    bars = Bars(Console(stderr=True))
    with ExitStack() as stack:
        written = stack.enter_context(closing(Appended(files.answers)))
        bar = stack.enter_context(bars).stage("Answers", total, done=num_known)
        for outcome in outcomes:
            if outcome.answer is None:
                errors.note(outcome.number, outcome.error or "")
            else:
                written.add(outcome.answer)
            bar.advance(1, tokens=outcome.num_tokens)

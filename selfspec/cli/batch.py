"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from selfspec.building.progress import Bars
from selfspec.cli.batch_answering import Answerer, Outcome
from selfspec.cli.batch_files import BatchFiles, Errors
from selfspec.cli.errors import CliError
from selfspec.cli.fleet import FleetOptions
from selfspec.cli.log import Verbose
from selfspec.cli.opened import checked
from selfspec.cli.options import (
    CacheFolder,
    DraftModelName,
    Knobs,
    MaxNewTokens,
    RememberFolder,
    RunOptions,
    Sampling,
    unfolds,
)
from selfspec.machine.amounts import amount_in_bytes

__all__ = ["batch"]


@unfolds
def batch(
    loading: RunOptions,
    sampling: Sampling,
    knobs: Knobs,
    workers: FleetOptions,
    prompts: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A file with one prompt a line, in JSON.")
    ],
    answers: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="Append the answers to this file. If it is there, the run goes on where it was.",
        ),
    ],
    cache: CacheFolder = None,
    remember: RememberFolder = None,
    draft_model: DraftModelName = None,
    max_new_tokens: MaxNewTokens = 256,
    max_rows: Annotated[
        int, typer.Option(min=1, help="The most texts that are written at the same time.")
    ] = 8,
    verbose: Verbose = False,
) -> None:
    """Answer a file of prompts, line by line; what was done is not done again."""
    config = checked(loading, knobs, draft_model)
    files = BatchFiles(prompts, answers)
    files.check()
    if loading.max_memory is not None:
        amount_in_bytes(loading.max_memory, whole=1)
    workers.check(loading.device)
    done, total = files.done()
    if len(done) == total:
        typer.echo(f"All {total} lines are answered in {answers}.", err=True)
        return
    answerer = Answerer(
        loading, sampling, config, cache, remember, draft_model, max_new_tokens, max_rows
    )
    opened = answerer.alone() if workers.ray is None else answerer.in_fleet(workers)
    try:
        with opened as answers_to:
            lines = (each for each in files.lines() if each[0] not in done)
            num_bad = _write(answers_to(lines), files, len(done), total)
    except KeyboardInterrupt:
        typer.echo("Stopped. The same command goes on from here.", err=True)
        raise
    if num_bad:
        typer.echo(f"{num_bad} of {total} lines have no answer; see {files.errors}.", err=True)
        raise typer.Exit(1)


def _write(outcomes: Iterator[Outcome], files: BatchFiles, num_done: int, total: int) -> int:
    """Writes down each outcome as it comes; returns how many lines could not be answered."""
    bars = Bars(Console(stderr=True))
    with ExitStack() as stack:
        errors = stack.enter_context(closing(Errors(files.errors)))
        stream = stack.enter_context(_appending(files.answers))
        bar = stack.enter_context(bars).stage("Answers", total, done=num_done)
        for outcome in outcomes:
            if outcome.answer is None:
                errors.add(outcome.number, outcome.error or "")
            else:
                stream.write(outcome.answer)
                stream.flush()
            bar.advance(1, tokens=outcome.num_tokens)
    return errors.number


def _appending(path: Path) -> Any:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise CliError(f"OUTPUT must be writable (got {str(path)!r}: {error})") from error

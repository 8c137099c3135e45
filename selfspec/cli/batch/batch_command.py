"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from rich.console import Console

from selfspec.building.progress import Bars
from selfspec.cli.batch.answerer import Answerer, Outcome
from selfspec.cli.batch.batch_files import Appended, BatchFiles, Errors, Progress
from selfspec.cli.shared.messages import say
from selfspec.cli.shared.options import Knobs, Model, WriteOptions
from selfspec.cli.shared.writer import checked


def batch(
    model: Model,
    prompts: Annotated[Path, Parameter(name="INPUT")],
    answers: Annotated[Path, Parameter(name="OUTPUT")],
    /,
    *,
    max_rows: PositiveInt = 8,
    asked: WriteOptions = WriteOptions(),
    knobs: Knobs = Knobs(),
) -> int:
    """Answer a file of prompts. A run that was stopped continues where it was.

    Args:
        prompts: A file with one prompt a line, in JSON.
        answers: Append the answers to this file. If it exists, the run is continued.
        max_rows: The largest number of texts that are written at the same time.
    """
    asked = replace(asked, model=model)
    config = checked(asked, knobs.config())
    files = BatchFiles(prompts, answers)
    files.check()
    answerer = Answerer(asked, config, max_rows)
    with files.locked():
        progress = files.progress()
        if len(progress.done) == progress.total:
            say(f"All {progress.total} lines are answered in {answers}.")
            return 0
        num_bad = _run(files, progress, answerer)
    if num_bad:
        say(f"{num_bad} of {progress.total} lines have no answer; see {files.errors}.")
    return 1 if num_bad else 0


def _run(files: BatchFiles, progress: Progress, answerer: Answerer) -> int:
    """Answers what is left; returns how many lines have no answer in the end."""
    with closing(Errors(files.errors)) as errors:
        for number, why in progress.unreadable.items():
            errors.note(number, why)
        if progress.unreadable:
            count = f"{errors.number} of {progress.total} lines can't be read"
            say(f"{count}; see {files.errors}.")
        if not progress.num_open:
            return errors.number
        known = progress.done | progress.unreadable.keys()
        try:
            with answerer.alone() as answers:
                lines = (each for each in files.lines() if each[0] not in known)
                _write(answers(lines), files, errors, len(known), progress.total)
        except KeyboardInterrupt:
            say("Stopped. The same command goes on from here.")
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

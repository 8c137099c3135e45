"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from selfspec.building.limits import vocab_size
from selfspec.cli.shared.messages import Verbose
from selfspec.cli.shared.opened import checked, loaded, memory_of_texts
from selfspec.cli.shared.options import Knobs, MaxNewTokens, WriteOptions, unfolds
from selfspec.config import SpecConfig
from selfspec.serving.batch_file import BatchFiles, Progress, outcomes
from selfspec.serving.calls import Limits


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
    with files.locked():
        progress = files.progress()
        num_bad, total = len(progress.unreadable), progress.total
        if not progress.left and not num_bad:
            typer.echo(f"All {total} lines are answered in {answers}.", err=True)
            return
        files.begin(progress)
        if num_bad:
            count = f"{num_bad} of {total} lines can't be read"
            typer.echo(f"{count}; see {files.errors}.", err=True)
        try:
            if progress.left:
                num_bad += answer(files, progress, asked, config, max_new_tokens, max_rows)
        except KeyboardInterrupt:
            typer.echo("Stopped. The same command goes on from here.", err=True)
            raise
    if num_bad:
        typer.echo(f"{num_bad} of {total} lines have no answer; see {files.errors}.", err=True)
        raise typer.Exit(1)


def answer(
    files: BatchFiles,
    progress: Progress,
    asked: WriteOptions,
    config: SpecConfig,
    max_new_tokens: int,
    max_rows: int,
) -> int:
    """Answers what is left; returns how many lines have no answer."""
    num_bad = 0
    with loaded(asked, max_new_tokens, num_texts=max_rows) as writer:
        from selfspec.batch.schedule import ShortestFirst
        from selfspec.batch.session import Session

        model = writer.model
        session = Session(
            model,
            writer.tokenizer,
            writer.new_spec(config),
            max_rows=max_rows,
            max_memory=memory_of_texts(model, writer.start.draft_model, asked.max_memory, max_rows),
            scheduler=ShortestFirst(),  # Nobody waits for a certain line of a file.
        )
        found = outcomes(
            files.open_lines(progress),
            session,
            writer.tokenizer,
            Limits(vocab_size(model), writer.loaded.max_positions),
            model_name=writer.loaded.name,
            seed=writer.seed,
            default={"max_new_tokens": max_new_tokens, **writer.choice()},
            length_option="--max-new-tokens",
        )
        columns = (BarColumn(14), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        about = TextColumn("{task.fields[tokens]} tokens")
        with Bar("Answers", *columns, about, console=Console(stderr=True)) as bar:
            num_known, tokens = progress.total - len(progress.left), 0
            task = bar.add_task("", total=progress.total, completed=num_known, tokens=0)
            for outcome in found:
                files.write(outcome)
                num_bad += outcome.answer is None
                tokens += outcome.num_tokens
                bar.update(task, advance=1, tokens=tokens)
    return num_bad

"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt
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
from selfspec.cli.shared.messages import say
from selfspec.cli.shared.options import Knobs, Model, WriteOptions
from selfspec.cli.shared.writer import checked, loaded, memory_of_texts
from selfspec.config import SpecConfig
from selfspec.serving.batch_file import BatchFiles, Progress, outcomes
from selfspec.serving.prompt_files import Limits


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
    with files.locked():
        progress = files.progress()
        num_bad, total = len(progress.unreadable), progress.total
        if not progress.left and not num_bad:
            say(f"All {total} lines are answered in {answers}.")
            return 0
        files.begin(progress)
        if num_bad:
            count = f"{num_bad} of {total} lines can't be read"
            say(f"{count}; see {files.errors}.")
        try:
            if progress.left:
                num_bad += answer(files, progress, asked, config, max_rows)
        except KeyboardInterrupt:
            say("Stopped. The same command goes on from here.")
            raise
    if num_bad:
        say(f"{num_bad} of {total} lines have no answer; see {files.errors}.")
    return 1 if num_bad else 0


def answer(
    files: BatchFiles,
    progress: Progress,
    asked: WriteOptions,
    config: SpecConfig,
    max_rows: int,
) -> int:
    """Answers what is left; returns how many lines have no answer."""
    num_bad = 0
    with loaded(asked, num_texts=max_rows) as writer:
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
            default={"max_new_tokens": asked.max_new_tokens, **writer.choice()},
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

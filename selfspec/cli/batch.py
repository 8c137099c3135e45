"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich import progress as rich
from rich.console import Console

from selfspec.cli.batch_file import BatchFiles, LineResult, Progress, results
from selfspec.cli.loading import check_options
from selfspec.cli.messages import say
from selfspec.cli.options import Knobs, Model, Positive, WriteOptions
from selfspec.cli.writer import load_writer
from selfspec.config import SpecConfig

if TYPE_CHECKING:
    from selfspec.cli.prompt_files import PromptLine
    from selfspec.cli.writer import Writer


def batch(
    model: Model,
    prompts: Annotated[Path, Parameter(name="INPUT")],
    answers: Annotated[Path, Parameter(name="OUTPUT")],
    /,
    *,
    max_rows: Positive = 8,
    options: WriteOptions = WriteOptions(),
    knobs: Knobs = Knobs(),
) -> int:
    """Answer a file of prompts. A run that was stopped continues where it was.

    A line that fails ends no other: the exit status is 1 at the end, and a second file says why.
    The next run tries such lines again.

    Args:
        prompts: A file with one prompt a line, in JSON.
        answers: The file of answers. If it exists, it is continued.
        max_rows: The most texts that are written at once.
    """
    options, config = replace(options, model=model), knobs.config()
    check_options(options)
    files = BatchFiles(prompts, answers)
    with files.locked():
        progress = files.progress()
        num_bad, total = progress.num_unreadable, progress.total
        if not progress.left and not num_bad:
            say(f"All {total} lines are answered in {answers}.")
            return 0
        if progress.left:
            if num_bad:
                say(f"{num_bad} of {total} lines can't be read; see {files.errors}.")
            try:
                writer = load_writer(
                    options, num_texts=max_rows, sees=True, packs=config.forward != "eager"
                )
                answered = _results(writer, files.open_lines(progress), config, max_rows)
                num_bad += _written(files, progress, answered)
            except KeyboardInterrupt:
                say("Stopped. The same command continues from here.")
                raise
    if num_bad:
        say(f"{num_bad} of {total} lines have no answer; see {files.errors}.")
    return 1 if num_bad else 0


def _results(
    writer: Writer, lines: Iterator[PromptLine], config: SpecConfig, max_rows: int
) -> Iterator[LineResult]:
    from selfspec.batch.prompt_maker import PromptMaker
    from selfspec.session import Session, ShortestFirst

    memory = writer.memory_of_texts(max_rows)
    # Without a limit for all texts, those that have ended are kept in a share of what is free.
    spec = writer.new_spec(config, kept_kv=None if memory else "25%")
    session = Session(
        spec.runner(writer.model),
        spec,
        max_rows=max_rows,
        max_memory=memory,
        scheduler=ShortestFirst(),  # The answers may come in any order.
        keeps_kv=True,
    )
    maker = PromptMaker(writer.model, writer.tokenizer, spec)
    translator = writer.translator()
    return results(lines, session, maker, translator, model_name=writer.name, seed=writer.seed)


def _written(files: BatchFiles, progress: Progress, answered: Iterator[LineResult]) -> int:
    """Writes results as they come, under a bar; returns how many are no answers."""
    num_bad = num_tokens = 0
    columns = (rich.BarColumn(14), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
    about = rich.TextColumn("{task.fields[tokens]} tokens")
    with rich.Progress("Answers", *columns, about, console=Console(stderr=True)) as bar:
        num_known = progress.total - len(progress.left)
        task = bar.add_task("", total=progress.total, completed=num_known, tokens=0)
        for result in answered:
            files.write(result)
            num_bad += not result.is_answer
            num_tokens += result.num_tokens
            bar.update(task, advance=1, tokens=num_tokens)
    return num_bad

"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from selfspec.building.progress import Bar, Bars
from selfspec.cli.batch_files import BatchFiles, Errors
from selfspec.cli.batch_lines import Line, read_line
from selfspec.cli.errors import CliError, one_line
from selfspec.cli.log import Verbose
from selfspec.cli.opened import checked, loaded
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
from selfspec.errors import SelfSpecError
from selfspec.machine.amounts import amount_in_bytes

if TYPE_CHECKING:
    from selfspec.batch import Answer
    from selfspec.batch.session import Session
    from selfspec.cli.writer import Writer

__all__ = ["batch"]

# Under --max-memory, texts of so many tokens have room in each row, if layers have to be streamed.
_TOKENS_A_ROW = 512
# Shares beside the rows': one for a prompt that is being read, one for dividing the rows anew.
_OTHER_SHARES = 2


@unfolds
def batch(
    loading: RunOptions,
    sampling: Sampling,
    knobs: Knobs,
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
    done, total = files.done()
    if len(done) == total:
        typer.echo(f"All {total} lines are answered in {answers}.", err=True)
        return
    with loaded(
        loading,
        sampling,
        max_new_tokens,
        cache,
        remember=remember,
        draft_model=draft_model,
        max_length=_TOKENS_A_ROW,
        max_texts=max_rows + _OTHER_SHARES,
    ) as writer:
        from selfspec.batch.session import Session

        memory = _memory_of_texts(writer, loading.max_memory, max_rows)
        session = Session(
            writer.model,
            writer.tokenizer,
            writer.new_spec(config),
            max_rows=max_rows,
            max_memory=memory,
        )
        try:
            num_bad = _Run(files, done, total, writer, session).run()
        except KeyboardInterrupt:
            typer.echo("Stopped. The same command goes on from here.", err=True)
            raise
    if num_bad:
        typer.echo(f"{num_bad} of {total} lines have no answer; see {files.errors}.", err=True)
        raise typer.Exit(1)


def _memory_of_texts(writer: Writer, max_memory: str | None, max_rows: int) -> int | None:
    """What the keys and values of all texts may take: what the model leaves of `--max-memory`."""
    if max_memory is None:
        return None
    from selfspec.run.rows_backend import kv_bytes_per_token

    weights: int = sum(p.numel() * p.element_size() for p in writer.model.parameters())
    num_tokens = _TOKENS_A_ROW * (max_rows + _OTHER_SHARES)
    set_aside = num_tokens * kv_bytes_per_token(writer.model)
    return max(amount_in_bytes(max_memory, weights + set_aside) - weights, set_aside)


class _Run:
    """One run over the lines that have no answer yet."""

    def __init__(
        self, files: BatchFiles, done: set[int], total: int, writer: Writer, session: Session
    ) -> None:
        self._files = files
        self._done = done
        self._total = total
        self._writer = writer
        self._session = session
        self._asked: dict[int, Line] = {}  # Lines that wait or run, by their numbers.

    def run(self) -> int:
        """Answers all lines; returns how many could not be."""
        bars = Bars(Console(stderr=True))
        with ExitStack() as stack:
            errors = stack.enter_context(closing(Errors(self._files.errors)))
            stream = stack.enter_context(_appending(self._files.answers))
            bar = stack.enter_context(bars).stage("Answers", self._total, done=len(self._done))
            for answer in self._answers(errors, bar):
                line = self._asked.pop(answer.index)
                stream.write(line.answered(answer, self._writer.loaded.name))
                stream.flush()
                bar.advance(1, tokens=len(answer.ids))
        return errors.number

    def _answers(self, errors: Errors, bar: Bar) -> Iterator[Answer]:
        lines = (each for each in self._files.lines() if each[0] not in self._done)
        while True:
            fresh = list(islice(lines, self._session.num_wanted))
            for number, data in fresh:
                try:
                    self._ask(read_line(number, data))
                except (SelfSpecError, TypeError, ValueError) as error:
                    errors.add(number, one_line(error))
                    bar.advance(1)
            if not fresh and self._session.is_empty:
                return
            yield from self._session.work()

    def _ask(self, line: Line) -> None:
        from selfspec.batch.prompts import encoded

        ids = encoded(line.prompt, self._writer.tokenizer)
        arguments = {
            "max_new_tokens": self._writer.max_new_tokens,
            **self._writer.choice(),
            **line.arguments,
        }
        self._check_length(len(ids), arguments["max_new_tokens"])
        seed = self._writer.seed + line.number - 1 if line.seed is None else line.seed
        self._session.submit(line.number, ids, seed, arguments)
        self._asked[line.number] = line

    def _check_length(self, num_ids: int, max_new_tokens: int) -> None:
        limit = self._writer.max_positions
        if limit is not None and num_ids + max_new_tokens > limit:
            raise CliError(
                f"prompt and answer must fit into the model's {limit} positions (got {num_ids} + "
                f"{max_new_tokens} tokens); shorten one of them"
            )


def _appending(path: Path) -> Any:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise CliError(f"OUTPUT must be writable (got {str(path)!r}: {error})") from error

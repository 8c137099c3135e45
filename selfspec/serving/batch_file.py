"""A file of prompts in, a file of answers out, line by line.

An answer is appended as soon as it is complete, and says which line it belongs to. So a run that
was stopped finds out from its own output where it was.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.errors import CliError, SelfSpecError, one_line
from selfspec.serving.prompt_files import Limits, PromptLine, numbered_lines, read_line
from selfspec.serving.replies import Form, Piece, usage_of
from selfspec.serving.schema import Chat, RequestError

if TYPE_CHECKING:
    from selfspec.batch import Answer
    from selfspec.batch.session import Session

_START = b'{"line": '  # Each line that we write begins so; the number of the line follows.
_OUR_ERRORS = re.compile(rb'\{"line": \d+, "error": |\Z')


class Outcome(NamedTuple):
    """What came of a line: what is written of its answer, or why there is none."""

    number: int
    answer: str | None
    error: str = ""
    num_tokens: int = 0


@dataclass
class Progress:
    """How far a file of prompts has come."""

    left: set[int] = field(default_factory=set)  # The numbers of lines that need the model.
    unreadable: dict[int, str] = field(default_factory=dict)  # Other lines, and what is wrong.
    total: int = 0


@dataclass(frozen=True)
class BatchFiles:
    """Where prompts come from and answers go."""

    prompts: Path
    answers: Path

    @property
    def errors(self) -> Path:
        """Where it is said which lines could not be answered, and why."""
        return self.answers.with_suffix(f".errors{self.answers.suffix}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from this output. Refuses files that can't be."""
        from filelock import FileLock, Timeout

        self._check()
        path = self.answers.resolve()
        lock = path.with_name(f".{path.name}.lock")
        with ExitStack() as stack:
            try:
                lock.touch()
                stack.enter_context(FileLock(lock, timeout=0))
            except Timeout:
                raise CliError(
                    f"OUTPUT must not be written by two runs at once (got {str(path)!r}, which "
                    "another run is writing); wait for it, or name another file"
                ) from None
            except OSError as error:
                raise _unwritable(path, error) from error
            yield

    def progress(self) -> Progress:
        """What an earlier run has answered, and which lines can't be understood.

        Removes what is left of an answer that was cut off. Refuses an output that belongs to
        another input, or to something else altogether; then nothing is changed.
        """
        answered, num_whole_bytes = self._answered()
        progress, first = Progress(), dict[Any, int]()
        for number, data in numbered_lines(self.prompts, "INPUT"):
            progress.total += 1
            try:
                line = read_line(number, data)
                other = first.setdefault(_key(line.name, number), number)
                if other != number:
                    got = f"got {line.name!r:.80}, which line {other} has too"
                    raise RequestError(f"custom_id must be another one for each line ({got})")
            except RequestError as error:
                progress.unreadable[number] = str(error)
                continue
            known = answered.pop(_key(line.name, number), None)
            if known is None:
                progress.left.add(number)
            elif known != line.checksum:
                raise self._foreign(f"holds an answer to another line {number}")
        for name in answered:
            raise self._foreign(f"holds an answer to {name!r:.80}, which is not in INPUT")
        if self.answers.exists() and self.answers.stat().st_size > num_whole_bytes:
            os.truncate(self.answers, num_whole_bytes)
        return progress

    def open_lines(self, progress: Progress) -> Iterator[PromptLine]:
        """The lines that are left for the model."""
        for number, data in numbered_lines(self.prompts, "INPUT"):
            if number in progress.left:
                yield read_line(number, data)

    def begin(self, progress: Progress) -> None:
        """Writes down which lines can't be read. Other errors of an earlier run are forgotten."""
        self.errors.unlink(missing_ok=True)
        for number, why in progress.unreadable.items():
            self.write(Outcome(number, None, why))

    def write(self, outcome: Outcome) -> None:
        """Appends an answer, or why there is none; a file is made with its first line."""
        path, line = self.answers, outcome.answer
        if line is None:
            path = self.errors
            line = json.dumps({"line": outcome.number, "error": outcome.error})
        try:
            with path.open("ab") as stream:
                stream.write(f"{line}\n".encode())
        except OSError as error:
            raise _unwritable(path, error) from error

    def _check(self) -> None:
        next(numbered_lines(self.prompts, "INPUT"))
        for path in (self.answers, self.errors):
            if not path.absolute().parent.is_dir() or (path.exists() and not path.is_file()):
                raise CliError(
                    "OUTPUT must be a plain file in a folder that exists, since a run that was "
                    f"stopped goes on from it (got {str(path)!r})"
                )
        if self.prompts.resolve() in (self.answers.resolve(), self.errors.resolve()):
            raise CliError(
                f"OUTPUT must be another file than INPUT (got {str(self.answers)!r} for both)"
            )
        if not self.errors.exists():
            return
        with self.errors.open("rb") as stream:
            if not _OUR_ERRORS.match(stream.read(80)):
                got = f"got {str(self.errors)!r}, which holds something else"
                rule = "the file of errors beside OUTPUT must be new, or from an earlier run"
                raise CliError(f"{rule} ({got}); move it")

    def _answered(self) -> tuple[dict[Any, str], int]:
        """The checksum of each line that was answered, and how many bytes all answers have."""
        answered: dict[Any, str] = {}
        num_bytes = 0
        if not self.answers.exists():
            return answered, num_bytes
        with self.answers.open("rb") as stream:
            for number, data in enumerate(stream, start=1):
                is_begun = data[:9] == _START[: len(data)] and data[9:10] in b"0123456789"
                if is_begun and not data.endswith(b"\n"):
                    break
                try:
                    value = json.loads(data)
                    name = dict(value).get("custom_id", value.get("id"))
                    answered[_key(name, value["line"])] = value["input"]
                except (LookupError, RecursionError, TypeError, ValueError) as error:
                    why = f"has a line {number} that is no answer to this INPUT"
                    raise self._foreign(why) from error
                num_bytes += len(data)
        return answered, num_bytes

    def _foreign(self, why: str) -> CliError:
        return CliError(
            f"OUTPUT must be new, or from an earlier run (got {str(self.answers)!r}, which {why}); "
            "name another file"
        )


def outcomes(
    lines: Iterable[PromptLine],
    session: Session,
    tokenizer: Any,
    limits: Limits,
    *,
    model_name: str,
    seed: int,
    default: Mapping[str, Any],
    length_option: str,
) -> Iterator[Outcome]:
    """What comes of each line, as soon as it is known.

    What a line leaves out is as in `default`, arguments of `generate()`. Without a seed of its own,
    line number 1 has `seed`, and line `n` has `seed + n - 1`.
    """
    asked: dict[int, PromptLine] = {}
    left = iter(lines)
    while True:
        fresh = list(islice(left, session.num_wanted))
        if not fresh and session.is_empty:
            return
        for line in fresh:
            prompt, settings = line.prompt_for(tokenizer), line.settings
            own_seed = seed + line.number - 1 if settings.seed is None else settings.seed
            try:
                ids, arguments = limits.call(
                    prompt, settings, tokenizer, default=default, length_option=length_option
                )
                session.submit(line.number, ids, own_seed, arguments)
            except (SelfSpecError, TypeError, ValueError) as error:
                yield Outcome(line.number, None, one_line(error))
                continue
            asked[line.number] = line
        for answer in session.work():
            line = asked.pop(answer.index)
            written = record(line, answer, model_name)
            yield Outcome(line.number, written, num_tokens=len(answer.ids))


def record(line: PromptLine, answer: Answer, model_name: str) -> str:
    """What is written of an answer, in the form of its line."""
    stats = {
        "num_steps": answer.stats.num_steps,
        "tokens_per_step": round(answer.stats.tokens_per_step, 3),
        "seconds": round(sum(answer.stats.seconds.values()), 4),
    }
    if line.in_body:
        form = Form(model_name, is_chat=isinstance(line.settings, Chat))
        pieces = [Piece(0, answer.text, answer.finish_reason)]
        body = form.whole(pieces, usage_of(answer.num_prompt_tokens, [answer]))
        response = {"status_code": 200, "body": body}
        written = {"custom_id": line.name, "response": response, "error": None}
    else:
        written = {
            **({} if line.name is None else {"id": line.name}),
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_new_tokens": len(answer.ids),
        }
    about = {"line": line.number, "input": line.checksum}
    return json.dumps({**about, **written, "ids": answer.ids, "stats": stats}, ensure_ascii=False)


def _key(name: Any, number: int) -> Any:
    """What an answer is found by: the name of its line, or the line's number."""
    return ("line", number) if name is None else name


def _unwritable(path: Path, error: OSError) -> CliError:
    return CliError(
        f"OUTPUT must be writable (got {str(path)!r}: {error.strerror or error}); what was written "
        "stays, and the same command goes on from there"
    )

"""A file of prompts in, a file of answers out, line by line.

Each answer is appended as soon as it is complete, with the number and the checksum of its line. So
a run that was stopped finds in its output where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.cli.prompt_files import PromptLine, numbered_lines, read_line
from selfspec.errors import CliError, one_line
from selfspec.machine.user_files import locked
from selfspec.serving.fields import RequestError
from selfspec.serving.replies import Piece, joined, usage_of
from selfspec.serving.response_form import new_form
from selfspec.serving.translator import PromptTranslator

if TYPE_CHECKING:
    from selfspec.batch import Answer
    from selfspec.batch.prompt_maker import PromptMaker
    from selfspec.prompt import Prompt
    from selfspec.serving.reply_decoder import ReplyDecoder
    from selfspec.session import Session

_START = b'{"line": '  # Each line that we write begins so.


class LineResult(NamedTuple):
    text: str
    is_answer: bool = True
    num_tokens: int = 0

    @classmethod
    def failed(cls, number: int, error: Exception, name: str | int | None = None) -> LineResult:
        code = getattr(error, "code", None) or type(error).__name__
        reason = {"code": code, "message": one_line(error)}
        about = {"line": number, "custom_id": name, "response": None, "error": reason}
        return cls(json.dumps(about, ensure_ascii=False), is_answer=False)


class Progress(NamedTuple):
    left: set[int]  # The numbers of the lines to be answered.
    num_unreadable: int
    total: int


@dataclass(frozen=True)
class BatchFiles:
    prompts: Path
    answers: Path

    @property
    def errors(self) -> Path:
        """The file that says which lines could not be answered, and why."""
        return self.answers.parent / f"{self.answers.stem}.errors{self.answers.suffix}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from this output. Refuses files that can't be read or written."""
        self._check()
        path = self.answers.resolve()
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(path.with_name(f".{path.name}.lock")))
            except TimeoutError:
                raise CliError(
                    f"OUTPUT must not be written by two runs at once (got {str(path)!r}, which "
                    "another run is writing); wait for it, or name another file"
                ) from None
            except OSError as error:
                raise _unwritable(path, error) from error
            yield

    def progress(self) -> Progress:
        """Which lines an earlier run has left to be answered.

        Removes an answer whose end is missing, and begins the file of errors with the lines that
        can't be read. An output that belongs to another input is refused, and not changed.
        """
        answered, num_whole_bytes = self._answered()
        left: set[int] = set()
        unreadable: list[LineResult] = []
        total = 0
        for number, data in numbered_lines(self.prompts, "INPUT"):
            total += 1
            known = answered.pop(number, None)
            try:
                line = read_line(number, data)
            except RequestError as error:
                unreadable.append(LineResult.failed(number, error))
                continue
            if known is None:
                left.add(number)
            elif known != line.checksum:
                raise self._foreign(f"holds an answer to another line {number}")
        if answered:
            raise self._foreign(f"holds an answer to line {min(answered)}, which is not in INPUT")
        if self.answers.exists() and self.answers.stat().st_size > num_whole_bytes:
            os.truncate(self.answers, num_whole_bytes)
        self.errors.unlink(missing_ok=True)
        for result in unreadable:
            self.write(result)
        return Progress(left, len(unreadable), total)

    def open_lines(self, progress: Progress) -> Iterator[PromptLine]:
        for number, data in numbered_lines(self.prompts, "INPUT"):
            if number in progress.left:
                yield read_line(number, data)

    def write(self, result: LineResult) -> None:
        path = self.answers if result.is_answer else self.errors
        try:
            with path.open("ab") as stream:
                stream.write(f"{result.text}\n".encode())
        except OSError as error:
            raise _unwritable(path, error) from error

    def _check(self) -> None:
        for path in (self.answers, self.errors):
            if not path.absolute().parent.is_dir() or (path.exists() and not path.is_file()):
                raise CliError(
                    "OUTPUT must be a plain file in a folder that exists, since a stopped run "
                    f"continues from it (got {str(path)!r})"
                )
        # A run locks OUTPUT by its name. INPUT is never changed, whatever its name is.
        files = [path for path in (self.prompts, self.answers, self.errors) if path.exists()]
        if any(a.samefile(b) for a, b in combinations(files, 2)):
            raise CliError(
                "INPUT, OUTPUT and the file of errors must be three files (got "
                f"{str(self.prompts)!r}, {str(self.answers)!r} and {str(self.errors)!r}); name "
                "another OUTPUT"
            )
        if self.errors.exists() and not _holds_our_errors(self.errors):
            raise CliError(
                "the file of errors of OUTPUT must be new, or from an earlier run (got "
                f"{str(self.errors)!r}, which holds something else); move it"
            )

    def _answered(self) -> tuple[dict[int, str], int]:
        """The checksums of the lines that were answered, and how many bytes all answers have."""
        answered: dict[int, str] = {}
        num_bytes = 0
        if not self.answers.exists():
            return answered, num_bytes
        with self.answers.open("rb") as stream:
            for index, data in enumerate(stream, start=1):
                answer = _object_in(data)
                number: Any = answer.get("line")
                checksum: Any = answer.get("input")
                is_answer = type(number) is int and isinstance(checksum, str)
                if not data.endswith(b"\n") and (
                    is_answer or (not answer and _begins_as_ours(data))
                ):
                    break  # A stopped run was writing it.
                if not is_answer:
                    raise self._foreign(f"has a line {index} that is no answer to this INPUT")
                answered[number] = checksum
                num_bytes += len(data)
        return answered, num_bytes

    def _foreign(self, why: str) -> CliError:
        return CliError(
            f"OUTPUT must be new, or from an earlier run (got {str(self.answers)!r}, which {why}); "
            "name another file"
        )


def results(
    lines: Iterable[PromptLine],
    session: Session,
    maker: PromptMaker,
    translator: PromptTranslator,
    *,
    model_name: str,
    seed: int,
) -> Iterator[LineResult]:
    """The results of all lines, as soon as they are known.

    If line `n` names no seed, it has `seed + n - 1`.
    """
    from selfspec.batch.many import answered
    from selfspec.serving.exchange import choices_of  # Imports torch.

    waiting: dict[int, PromptLine] = {}
    replies: dict[int, ReplyDecoder] = {}

    def prepare(line: PromptLine) -> Prompt:
        settings, prepare = line.settings, partial(maker.prompt, line.number)
        line_seed = seed + line.number - 1 if settings.seed is None else settings.seed
        ((prompt, reply),) = choices_of(settings, [line.prompt], translator, prepare, line_seed)
        replies[line.number] = reply
        return prompt

    def calls() -> Iterator[tuple[int, Callable[[], Prompt]]]:
        for line in lines:
            waiting[line.number] = line
            yield line.number, partial(prepare, line)

    for answer in answered(session, calls()):
        line, reply = waiting.pop(answer.index), replies.pop(answer.index, None)
        if answer.error is not None:
            yield LineResult.failed(line.number, answer.error, line.name)
        elif reply is not None:
            text = record(line, answer, reply.end(answer), model_name)
            yield LineResult(text, num_tokens=len(answer.ids))


def record(line: PromptLine, answer: Answer, pieces: Sequence[Piece], model_name: str) -> str:
    """The record of an answer, in the form of its line; `pieces` are its text."""
    stats = {
        "num_steps": answer.stats.num_steps,
        "tokens_per_step": round(answer.stats.tokens_per_step, 3),
        "seconds": round(sum(answer.stats.seconds.values()), 4),
    }
    if line.body is not None:
        form = new_form(model_name, line.settings, line.body)
        body = form.whole(pieces, usage_of([answer], [answer]))
        response = {"status_code": 200, "body": body}
        written = {"custom_id": line.name, "response": response, "error": None}
    else:
        name = {} if line.name is None else {"id": line.name}
        whole = joined(pieces)
        written = {
            **name,
            "text": whole.text,
            "finish_reason": whole.finish_reason,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_new_tokens": len(answer.ids),
        }
    about = {"line": line.number, "input": line.checksum}
    return json.dumps({**about, **written, "ids": answer.ids, "stats": stats}, ensure_ascii=False)


def _begins_as_ours(data: bytes) -> bool:
    return data[:9] == _START[: len(data)] and data[9:10] in b"0123456789"


def _holds_our_errors(path: Path) -> bool:
    with path.open("rb") as stream:
        return all(
            _begins_as_ours(data) and (b', "error": ' in data or not data.endswith(b"\n"))
            for data in stream
        )


def _object_in(data: bytes) -> dict[str, Any]:
    """The object in a line of JSON; an empty one if there is none."""
    try:
        value = json.loads(data)
    except (RecursionError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _unwritable(path: Path, error: OSError) -> CliError:
    return CliError(
        f"OUTPUT must be writable (got {str(path)!r}: {error.strerror or error}); what was written "
        "stays, and the same command continues from there"
    )

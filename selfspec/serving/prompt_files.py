"""Files of prompts, one a line: the one dialect of every command that takes such a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from selfspec.errors import unknown_name
from selfspec.serving.schema import (
    Chat,
    Completion,
    FilledText,
    Messages,
    Name,
    RequestError,
    Settings,
    checked,
    json_object,
)

_FORMS = ("prompt", "messages", "turns", "body")


@dataclass(frozen=True)
class PromptLine:
    """One line: what is asked, and how the answer is to be written."""

    number: int  # Counted from 1, empty lines too.
    checksum: str
    name: str | int | None  # Its `custom_id` or `id`.
    prompt: Any  # Text, messages or token ids; the first one of `turns`.
    turns: tuple[str, ...]  # The questions of a benchmark; mostly empty.
    settings: Settings
    in_body: bool  # Is it in OpenAI's form? Then its answer is, too.

    def prompt_for(self, tokenizer: Any) -> Any:
        """The prompt for `encoded`: a first turn is a user's message if the model can chat."""
        if self.turns and tokenizer.chat_template:
            return [{"role": "user", "content": self.prompt}]
        return self.prompt


class _Line(Settings):
    """A line in the short form. Fields that are not known are somebody's own."""

    model_config = ConfigDict(extra="allow")

    id: Name | None = None
    custom_id: Name | None = None
    body: dict[str, Any] | None = None
    prompt: FilledText | None = None
    messages: Messages | None = None
    turns: Annotated[list[FilledText], Field(min_length=1)] | None = None


def numbered_lines(path: Path, option: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers; `option` names the file."""
    if not path.is_file():
        raise RequestError(f"{option} must be a file with one prompt a line (got {str(path)!r})")
    try:
        with path.open("rb") as stream:
            for number, data in enumerate(stream, start=1):
                if data.strip():
                    yield number, data
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror}"
        raise RequestError(f"{option} must be readable (got {got})") from error


def read_prompts(path: Path, option: str) -> list[PromptLine]:
    """All prompts of a file; refuses the file for its first line that is none."""
    prompts = []
    for number, data in numbered_lines(path, option):
        try:
            prompts.append(read_line(number, data))
        except RequestError as error:
            raise RequestError(f"{option}, line {number}: {error}", field=error.field) from None
    if not prompts:
        got = f"{str(path)!r}, which is empty"
        raise RequestError(f"{option} must have a prompt at least (got {got})")
    return prompts


def read_line(number: int, data: bytes) -> PromptLine:
    """What a line asks for."""
    line = checked(_Line, json_object(data, "a line"))
    given = [name for name in _FORMS if getattr(line, name) is not None]
    if len(given) != 1:
        names = ", ".join(given or list(line.model_extra or ())[:5]) or "no field"
        raise RequestError(f"a line must have one of {', '.join(_FORMS)} (got {names:.80})")
    prompt, settings = _in_body(line.body) if line.body is not None else _plain(line)
    name = line.id if line.custom_id is None else line.custom_id
    in_body, turns = line.body is not None, tuple(line.turns or ())
    return PromptLine(number, checksum(data), name, prompt, turns, settings, in_body)


def _plain(line: _Line) -> tuple[Any, Settings]:
    for name in line.model_extra or ():
        # Beside a prompt there may be fields of one's own, but hardly one like "temprature".
        if get_close_matches(name, Settings.model_fields, cutoff=0.85):
            raise RequestError(unknown_name("field", name, Settings.model_fields), field=name)
    if line.messages is not None:
        return [each.as_dict() for each in line.messages], line
    return (line.turns[0] if line.turns else line.prompt), line


def _in_body(body: dict[str, Any]) -> tuple[Any, Settings]:
    request = checked(Chat if "messages" in body else Completion, body)
    if request.stream or request.n * len(request.prompts) != 1:
        field = "stream" if request.stream else "n" if request.n != 1 else "prompt"
        raise RequestError(f"{field} must ask for one answer, as a whole", field=field)
    return request.prompts[0], request


def checksum(data: bytes) -> str:
    """Says whether a line is still the one that was answered.

    >>> checksum(b'{"prompt": "a"}') == checksum(b' {"prompt": "a"}  ')
    True
    """
    return hashlib.sha256(data.strip()).hexdigest()[:12]

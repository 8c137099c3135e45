"""The lines of a prompt file, in OpenAI's form or in a short one."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from selfspec.errors import unknown_name
from selfspec.serving.fields import RequestError, checked, json_object
from selfspec.serving.messages import FilledText, Messages
from selfspec.serving.responses import Responses
from selfspec.serving.schema import Chat, Completion, TextRequest
from selfspec.serving.settings import Settings

_FORMS = ("prompt", "messages", "body")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class PromptLine:
    number: int  # Counted from 1, empty lines too.
    checksum: str
    name: str | int | None  # The `custom_id` or `id` of the line.
    prompt: Any  # Text, messages or token ids.
    settings: Settings
    body: dict[str, Any] | None  # Of a line in OpenAI's form; its answer is in that form too.


class _Line(Settings):
    """A line in the short form. Unknown fields are ignored: users may add what they like."""

    model_config = ConfigDict(extra="allow")

    id: str | int | None = None
    custom_id: str | int | None = None
    body: dict[str, Any] | None = None
    prompt: FilledText | None = None
    messages: Messages | None = None


def numbered_lines(path: Path, option: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers; `option` names the file."""
    if not path.is_file():
        raise RequestError(f"{option} must be a file with one prompt a line (got {str(path)!r})")
    is_empty = True
    with path.open("rb") as stream:
        for number, data in enumerate(stream, start=1):
            if number == 1 and data.startswith(_UTF_16):
                got = f"got {str(path)!r}, which is UTF-16"
                raise RequestError(f"{option} must be UTF-8 text ({got}); save it as UTF-8")
            if data.strip():
                is_empty = False
                yield number, data
    if is_empty:
        got = f"{str(path)!r}, which is empty"
        raise RequestError(f"{option} must have a prompt at least (got {got})")


def read_prompts(path: Path, option: str) -> list[PromptLine]:
    """All prompts of a file, which is refused if one of its lines is no prompt."""
    prompts = []
    for number, data in numbered_lines(path, option):
        try:
            prompts.append(read_line(number, data))
        except RequestError as error:
            raise RequestError(f"{option}, line {number}: {error}", field=error.field) from None
    return prompts


def read_line(number: int, data: bytes) -> PromptLine:
    """The request in a line. Spaces around the line do not change its checksum."""
    line = checked(_Line, json_object(data, 'a line, such as {"prompt": "…"},'))
    forms = [name for name in _FORMS if getattr(line, name) is not None]
    if len(forms) != 1:
        names = ", ".join(forms or list(line.model_extra or ())[:5]) or "no field"
        raise RequestError(f"a line must have one of {', '.join(_FORMS)} (got {names:.80})")
    prompt, settings = _in_body(line.body) if line.body is not None else _plain(line)
    return PromptLine(
        number=number,
        checksum=hashlib.sha256(data.strip()).hexdigest()[:12],
        name=line.id if line.custom_id is None else line.custom_id,
        prompt=prompt,
        settings=settings,
        body=line.body,
    )


def _plain(line: _Line) -> tuple[Any, Settings]:
    for name in line.model_extra or ():
        # A user may add fields, but hardly one like "temprature".
        if get_close_matches(name, Settings.model_fields, cutoff=0.85):
            raise RequestError(unknown_name("field", name, Settings.model_fields), field=name)
    if line.messages is not None:
        return [message.as_dict() for message in line.messages], line
    return line.prompt, line


def _in_body(body: dict[str, Any]) -> tuple[Any, Settings]:
    forms: dict[str, type[TextRequest]] = {"messages": Chat, "input": Responses}
    form = next((forms[name] for name in forms if name in body), Completion)
    request = checked(form, body)
    if request.stream or request.n * len(request.prompts) != 1:
        field = "stream" if request.stream else "n" if request.n != 1 else "prompt"
        raise RequestError(f"{field} must ask for one answer, as a whole", field=field)
    return request.prompts[0], request

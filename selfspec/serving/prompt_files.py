"""Prompts as users give them: the lines of a prompt file, and how a prompt becomes the tokens and
arguments of a `generate()` call.
"""

from __future__ import annotations

import codecs
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from selfspec.errors import one_line, unknown_name
from selfspec.serving.images import ImageReader
from selfspec.serving.schema import (
    Chat,
    Completion,
    FilledText,
    Messages,
    RequestError,
    Settings,
    Tool,
    checked,
    json_object,
    whole_characters,
)

_FORMS = ("prompt", "messages", "turns", "body")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BYTES_A_POSITION = 16  # A text with more for each position of the model is too long for it.
_DEFAULT_TOKENS = 1024  # The most tokens of an answer whose length is not given.


# Token ids, or what a processor made of a prompt.
Encoded = list[int] | dict[str, Any]


def num_tokens(encoded: Sequence[int] | Mapping[str, Any]) -> int:
    return int(encoded["input_ids"].shape[1]) if isinstance(encoded, Mapping) else len(encoded)


@dataclass(frozen=True)
class PromptLine:
    number: int  # Counted from 1, empty lines too.
    checksum: str
    name: str | int | None  # Its `custom_id` or `id`.
    prompt: Any  # Text, messages or token ids; the first one of `turns`.
    turns: tuple[str, ...]  # The questions of a benchmark; mostly empty.
    settings: Settings
    in_body: bool  # Is it in OpenAI's form? Then its answer is, too.

    def prompt_for(self, tokenizer: Any) -> Any:
        """The prompt for `encoded`: a first turn is a user's message if the model can chat."""
        return as_turn(self.prompt, tokenizer) if self.turns else self.prompt


def _texts_of(prompt: Any) -> Iterator[str]:
    for each in [prompt] if isinstance(prompt, str) else prompt:
        content = each["content"] if isinstance(each, Mapping) else each
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (text for part in parts if isinstance(text := part.get("text"), str))


def as_turn(text: str, tokenizer: Any) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def _name(value: Any) -> Any:
    if type(value) not in (int, str):
        raise ValueError("must be text or a whole number")
    return whole_characters(value) if isinstance(value, str) else value


class _Line(Settings):
    """A line in the short form. Unknown fields are the user's own, and are ignored."""

    model_config = ConfigDict(extra="allow")

    id: Annotated[Any, AfterValidator(_name)] = None
    custom_id: Annotated[Any, AfterValidator(_name)] = None
    body: dict[str, Any] | None = None
    prompt: FilledText | None = None
    messages: Messages | None = None
    turns: Annotated[list[FilledText], Field(min_length=1)] | None = None


def numbered_lines(path: Path, option: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers; `option` names the file."""
    if not path.is_file():
        raise RequestError(f"{option} must be a file with one prompt a line (got {str(path)!r})")
    is_empty = True
    try:
        with path.open("rb") as stream:
            for number, data in enumerate(stream, start=1):
                if number == 1 and data.startswith(_UTF_16):
                    got = f"got {str(path)!r}, which is UTF-16"
                    raise RequestError(f"{option} must be UTF-8 text ({got}); save it as UTF-8")
                if data.strip():
                    is_empty = False
                    yield number, data
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror}"
        raise RequestError(f"{option} must be readable (got {got})") from error
    if is_empty:
        got = f"{str(path)!r}, which is empty"
        raise RequestError(f"{option} must have a prompt at least (got {got})")


def read_prompts(path: Path, option: str) -> list[PromptLine]:
    """All prompts of a file; refuses the file for its first line that is none."""
    prompts = []
    for number, data in numbered_lines(path, option):
        try:
            prompts.append(read_line(number, data))
        except RequestError as error:
            raise RequestError(f"{option}, line {number}: {error}", field=error.field) from None
    return prompts


def read_line(number: int, data: bytes) -> PromptLine:
    """What a line asks for. Spaces around it do not change its checksum."""
    line = checked(_Line, json_object(data, "a line"))
    given = [name for name in _FORMS if getattr(line, name) is not None]
    if len(given) != 1:
        names = ", ".join(given or list(line.model_extra or ())[:5]) or "no field"
        raise RequestError(f"a line must have one of {', '.join(_FORMS)} (got {names:.80})")
    prompt, settings = _in_body(line.body) if line.body is not None else _plain(line)
    return PromptLine(
        number=number,
        checksum=hashlib.sha256(data.strip()).hexdigest()[:12],
        name=line.id if line.custom_id is None else line.custom_id,
        prompt=prompt,
        turns=tuple(line.turns or ()),
        settings=settings,
        in_body=line.body is not None,
    )


def _plain(line: _Line) -> tuple[Any, Settings]:
    for name in line.model_extra or ():
        # A line may have fields of the user's own, but hardly one like "temprature".
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


@dataclass(frozen=True)
class Encoder:
    """Turns prompts and settings into tokens and arguments, within what the model allows.

    What the settings leave out is as in `default`, whose length the user names `length_option`.
    """

    tokenizer: Any
    vocab_size: int
    max_positions: int | None
    default: Mapping[str, Any] = field(default_factory=dict)
    length_option: str = "max_tokens"
    images: ImageReader = field(default_factory=ImageReader)
    end_ids: Sequence[int] = ()  # The tokens that end the model's texts.

    def arguments_for(self, prompt: Any, settings: Settings) -> tuple[Encoded, dict[str, Any]]:
        """The tokens of a prompt, with what belongs to its images, and its call's arguments."""
        tools = settings.tools if isinstance(settings, Chat) else None
        own, field = settings.arguments(), settings.spelled("messages")
        encoded = self._encoded(self.images.pictured(prompt), tools, field)
        if isinstance(settings, Chat) and settings.callable_tools:
            from selfspec.batch.guides import Guide
            from selfspec.serving.tool_forms import grammar_of

            own["schema"] = Guide(grammar_of(settings, self.tokenizer), is_lark=True)
        self._check_ids("logit_bias", [token for (token,) in own.get("sequence_bias", ())])
        own |= self._ends(settings)
        arguments = {**self.default, **own}
        wanted = arguments.get("max_new_tokens")
        setting = next(iter(settings.lengths), self.length_option)
        length = self._length(num_tokens(encoded), wanted, setting)
        if (settings.min_tokens or 0) > length:
            rule = f"min_tokens must be <= {length}, the most tokens of the answer"
            raise RequestError(f"{rule} (got {settings.min_tokens})", field="min_tokens")
        return encoded, {**arguments, "max_new_tokens": length}

    def _ends(self, settings: Settings) -> dict[str, Any]:
        """The tokens that end the answer, where the request says which."""
        more = settings.stop_token_ids or []
        self._check_ids("stop_token_ids", more)
        if not (more or settings.ignore_eos):
            return {}
        ends = [*more, *(() if settings.ignore_eos else self.end_ids)]
        # Without any, transformers takes those of the model. An unknown token ends nothing.
        return {"eos_token_id": ends or [self.vocab_size]}

    def _encoded(
        self, prompt: Any, tools: Sequence[Tool] | None, of_messages: str = "messages"
    ) -> Encoded:
        from selfspec.batch.prompts import inputs_of  # It brings torch along.

        is_chat = isinstance(prompt, list) and isinstance(prompt[0], Mapping)
        field = of_messages if is_chat else "prompt"
        self._check_size(field, prompt)
        try:
            shown = [each.model_dump(exclude_none=True) for each in tools] if tools else None
            ids = inputs_of(prompt, self.images.processor or self.tokenizer, shown)
        except Exception as error:  # A template may raise whatever it likes.
            why = one_line(error)[:300]
            raise RequestError(f"{field} can't be made into tokens: {why}", field=field) from error
        if not num_tokens(ids):
            raise RequestError(f"{field} must have at least one token (got none)", field=field)
        if isinstance(ids, list) and isinstance(prompt, list):
            self._check_ids(field, ids)
        return ids

    def _check_size(self, field: str, prompt: Any) -> None:
        """Refuses a text that is obviously too long, since tokenizing it may take seconds."""
        most = _BYTES_A_POSITION * (self.max_positions or sys.maxsize)
        if (
            size := sum(len(each.encode(errors="surrogatepass")) for each in _texts_of(prompt))
        ) > most:
            rule = f"{field} must have at most {most} bytes of text"
            raise RequestError(
                f"{rule}, for the model's {self.max_positions} positions (got {size})",
                field=field,
                code="context_length_exceeded",
            )

    def _check_ids(self, field: str, ids: list[int]) -> None:
        if wrong := [each for each in ids if not 0 <= each < self.vocab_size]:
            rule = f"{field} must have ids of the model's {self.vocab_size} tokens"
            raise RequestError(f"{rule} (got {wrong[0]!r:.40})", field=field)

    def _length(self, num_ids: int, wanted: int | None, setting: str) -> int:
        if self.max_positions is None:
            return _DEFAULT_TOKENS if wanted is None else wanted
        room = self.max_positions - num_ids
        wanted = min(_DEFAULT_TOKENS, max(room, 1)) if wanted is None else wanted
        if wanted > room:
            raise RequestError(
                f"prompt and answer must fit into the model's {self.max_positions} positions (got "
                f"{num_ids} + {wanted} tokens); shorten the prompt, or lower {setting}",
                field=setting if room > 0 else None,
                code="context_length_exceeded",
            )
        return wanted

"""The messages of a chat and the functions that it may call, as OpenAI's protocol has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, model_validator

from selfspec.serving.fields import Fields

FilledText = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class _Item(Fields):
    """A part of a conversation. Fields that no template shows are ignored: clients keep many."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_Item):
    type: Literal["text"]
    text: str


class Address(_Item):
    url: str


class ImagePart(_Item):
    type: Literal["image_url"]
    image_url: Address


def text_or_parts(content: str | Sequence[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    """A text, or the parts of a content with images; texts without images become one."""
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return "".join(texts)
    return [part.model_dump() for part in content]


def _arguments(text: str) -> Any:
    """The arguments of a call as chat templates take them: an object, where they are one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class Called(_Item):
    name: Name
    arguments: Annotated[str, AfterValidator(_arguments)]


class ToolCall(_Item):
    id: str
    type: Literal["function"] = "function"
    function: Called


class Message(_Item):
    """A message, of which `as_dict` has what chat templates know."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[
        str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
        AfterValidator(text_or_parts),
    ] = ""
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    tool_calls: Annotated[list[ToolCall] | None, AfterValidator(lambda calls: calls or None)] = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("must have content")
        return self

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, warnings=False)  # Arguments are no text here.


class Function(Fields):
    name: Name
    description: str | None = None
    parameters: Annotated[
        dict[str, Any],
        AfterValidator(lambda schema: {"type": "object", **schema}),
        Field(default={}, validate_default=True),
    ]
    strict: bool | None = None


class Tool(Fields):
    ignored = frozenset({"cache_control"})

    type: Literal["function"] = "function"
    function: Function


class _Named(Fields):
    name: Name


class ToolChoice(Fields):
    type: Literal["function"]
    function: _Named


Tools = Annotated[list[Tool], Field(max_length=128)]
Messages = Annotated[list[Message], Field(min_length=1)]

"""The messages of a chat and the functions that it may call, as OpenAI's protocol has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from selfspec.serving.fields import Fields

FilledText = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class _Item(Fields):
    """A part of a conversation. Fields that no template shows are ignored: clients send many."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_Item):
    type: Literal["text"]
    text: str


class Address(_Item):
    url: str
    detail: str | None = None


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
    return [part.model_dump(exclude_none=True) for part in content]


class Called(_Item):
    name: Name
    arguments: str  # JSON


class ToolCall(_Item):
    id: str
    type: Literal["function"] = "function"
    function: Called

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it: arguments are an object, where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(_Item):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
        AfterValidator(text_or_parts),
    ] = ""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # Its newer name.
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("must have content")
        return self

    def as_dict(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if thoughts := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thoughts  # Templates that show it know this name.
        return message


class Function(_Item):
    name: Name
    description: str | None = None
    parameters: Annotated[
        dict[str, Any],
        AfterValidator(lambda schema: {"type": "object", **schema}),
        Field(default={}, validate_default=True),
    ]
    strict: bool | None = None


class Tool(_Item):
    type: Literal["function"] = "function"
    function: Function


class _Named(_Item):
    name: Name


class ToolChoice(_Item):
    type: Literal["function"]
    function: _Named


Tools = Annotated[list[Tool], Field(max_length=128)]
Messages = Annotated[list[Message], Field(min_length=1)]

"""The messages of a chat and the functions that it may call, as OpenAI's protocol has them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from selfspec.serving.fields import Fields, whole_characters

_HINTS = {"annotations", "cache_control"}  # Parts of a message may have them, for others.


def text_of_parts(content: object) -> str:
    """A text, or the texts of OpenAI's content parts, one after the other."""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        if not is_text or {*part} - _HINTS != {"type", "text"} or part["type"] != "text":
            raise ValueError("must be text, or a list of parts with type: 'text', and text")
    return "".join(part["text"] for part in parts)


def text_or_parts(content: object) -> str | list[dict[str, Any]]:
    """A text, or the parts of a content with images; texts without images become one."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return whole_characters(text_of_parts(content))
    for index, part in enumerate(content):
        if not _is_image(part):
            whole_characters(text_of_parts([part]))
            continue
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else None
        known = {"type", "image_url", "url", "detail", *_HINTS}
        if not isinstance(url, str) or {*part, *image} - known:
            raise ValueError(f"must have a url, or url and detail alone, in [{index}].image_url")
    return content


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


FilledText = Annotated[str, Field(min_length=1), AfterValidator(whole_characters)]
Content = Annotated[str, BeforeValidator(text_of_parts), AfterValidator(whole_characters)]

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Called(Fields):
    name: Name
    arguments: str  # JSON


class ToolCall(Fields):
    ignored = frozenset({"index"})

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


class Message(Fields):
    ignored = frozenset({"annotations", "cache_control", "reasoning_details"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(text_or_parts)] = ""
    name: str | None = None
    refusal: None = None
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
            message |= {"tool_call_id": self.tool_call_id}
        if thoughts := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": thoughts}  # Templates that show it know this name.
        return message


_OBJECT: dict[str, Any] = {"type": "object"}


class Function(Fields):
    name: Name
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(lambda schema: {**_OBJECT, **schema})] = (
        _OBJECT
    )
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


Messages = Annotated[list[Message], Field(min_length=1)]

"""OpenAI's newer route for texts, `/v1/responses`: another spelling of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from selfspec.serving.messages import Messages, ToolChoice, Tools
from selfspec.serving.schema import Chat
from selfspec.serving.settings import Length, ResponseFormat

_SCORES = "message.output_text.logprobs"
_THOUGHT = {"role": "assistant", "reasoning": ""}  # It keeps the place of the item.


def _messages(value: object) -> list[Any]:
    """The messages of a chat, one for an item of an input."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, (list, dict)):
        raise ValueError("must be text or a list of items")
    messages = list(map(_message, value if isinstance(value, list) else [value]))
    if messages and all(message == _THOUGHT for message in messages):
        raise ValueError("must have an item beside those of reasoning")
    return messages


def _message(item: object) -> object:
    if not isinstance(item, dict):
        return item
    item_type = item.get("type") or "message"
    if item_type == "reasoning":
        return _THOUGHT
    if item_type == "message":
        return {**item, "content": _parts(item.get("content"))}
    if item_type == "function_call":
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": item}]}
    if item_type == "function_call_output":
        content = _parts(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    raise ValueError("must be items that are messages, or calls of functions")


def _parts(content: object) -> object:
    return list(map(_part, content)) if isinstance(content, list) else content


def _part(part: object) -> object:
    if not isinstance(part, dict):
        return part
    part_type = part.get("type")
    if part_type in ("input_text", "output_text"):
        return {**part, "type": "text"}
    if part_type == "input_image" and part.get("image_url") is not None:
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if part_type not in ("text", "image_url"):
        rule = "must have contents of input_text, output_text, and input_image by its URL"
        raise ValueError(rule)
    return part


def _format(text: object) -> object:
    """The `response_format` of a chat; none for plain text."""
    format = text.get("format") if isinstance(text, dict) else text
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return None if isinstance(format, dict) and format.get("type") == "text" else format
    schema = {name: value for name, value in format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _effort(reasoning: object) -> object:
    return reasoning.get("effort") if isinstance(reasoning, dict) else reasoning


def _function(tool: object) -> object:
    """A tool, or the choice of one, with its fields one level deeper."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _functions(tools: object) -> object:
    return list(map(_function, tools)) if isinstance(tools, list) else tools


def _wants_scores(include: object) -> bool:
    """Does a list of what else a response may have name the scores? Others it never has."""
    if not isinstance(include, list):
        raise ValueError("must be a list")
    return _SCORES in include


class Responses(Chat):
    """Another spelling of a chat. Fields of vLLM's are taken too."""

    scores_option = f"include: [{_SCORES!r}]"

    messages: Annotated[Messages, BeforeValidator(_messages), Field(alias="input")]
    instructions: str | None = None
    max_completion_tokens: Annotated[Length, Field(alias="max_output_tokens")] = None
    response_format: Annotated[
        ResponseFormat | None, BeforeValidator(_format), Field(alias="text")
    ] = None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    reasoning_effort: Annotated[str | None, BeforeValidator(_effort), Field(alias="reasoning")] = (
        None
    )
    tools: Annotated[Tools | None, BeforeValidator(_functions)] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice | None, BeforeValidator(_function)
    ] = None
    logprobs: Annotated[bool, BeforeValidator(_wants_scores), Field(alias="include")] = False
    store: bool = False  # type: ignore[assignment]
    n: Literal[1] = 1

    @property
    def prompts(self) -> list[Any]:
        """The messages, in which a text and calls that follow each other are one, as in chats."""
        system = {"role": "system", "content": self.instructions}
        merged: list[dict[str, Any]] = [system] if self.instructions else []
        for item in self.messages:
            if item.reasoning_content == "":
                continue
            message, before = item.as_dict(), merged[-1] if merged else {}
            if "tool_calls" in message and before.get("role") == "assistant":
                calls = [*before.get("tool_calls", ()), *message["tool_calls"]]
                merged[-1] = {**before, "tool_calls": calls}
            else:
                merged.append(message)
        return [merged]

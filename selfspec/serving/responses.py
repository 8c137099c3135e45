"""OpenAI's newer route for texts, `/v1/responses`: another spelling of a chat, and of its reply."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from selfspec.serving.fields import RequestError
from selfspec.serving.messages import Messages, ToolChoice, Tools
from selfspec.serving.replies import Form, Piece, entries_of, event
from selfspec.serving.schema import Chat, Length, ResponseFormat, Settings

if TYPE_CHECKING:
    from selfspec.batch.token_scores import TokenScore

# What a request says of itself, which its response repeats.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}
_FIXED: dict[str, Any] = {
    **dict.fromkeys(("error", "previous_response_id")),
    **dict.fromkeys(("background", "store"), False),
    "truncation": "disabled",
}
_SCORES, _THOUGHTS = "message.output_text.logprobs", "reasoning.encrypted_content"
_THOUGHT = {"role": "assistant", "reasoning": ""}  # It keeps the place of the item.
_OF_ITEMS = {"id", "status"}  # Of items that come back; they say nothing to a model.


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
    fields = _without_nulls(item, _OF_ITEMS)
    item_type = fields.pop("type", "message")
    if item_type == "reasoning":
        return _THOUGHT
    if item_type == "message":
        return {**fields, "content": _parts(fields.get("content"))}
    if item_type == "function_call":
        call = {"id": fields.pop("call_id", None), "function": fields}
        return {"role": "assistant", "tool_calls": [call]}
    if item_type == "function_call_output":
        call_id = fields.pop("call_id", None)
        content = _parts(fields.pop("output", None))
        return {"role": "tool", **fields, "tool_call_id": call_id, "content": content}
    raise ValueError("must be items that are messages, or calls of functions")


def _parts(content: object) -> object:
    return list(map(_part, content)) if isinstance(content, list) else content


def _part(part: object) -> object:
    if not isinstance(part, dict):
        return part
    fields = _without_nulls(part, {"annotations", "logprobs", "detail"})
    if fields.get("type") in ("input_text", "output_text"):
        return {**fields, "type": "text"}
    if fields.get("type") == "input_image" and "image_url" in fields:
        return {**fields, "type": "image_url", "image_url": {"url": fields["image_url"]}}
    if fields.get("type") not in ("text", "image_url"):
        raise ValueError(
            "must have contents of input_text, output_text, and input_image by its URL"
        )
    return part


def _format(text: object) -> object:
    """The `response_format` of a chat; none for plain text."""
    text = _without_nulls(text)
    if isinstance(text, dict) and {*text} - {"format"}:
        raise ValueError("must have a format alone")
    format = _without_nulls(text.get("format")) if isinstance(text, dict) else text
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return None if format == {"type": "text"} else format
    schema = {name: value for name, value in format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _effort(reasoning: object) -> object:
    reasoning = _without_nulls(reasoning)
    if not isinstance(reasoning, dict) or {*reasoning} - {"effort"}:
        raise ValueError("must have an effort alone")
    return reasoning.get("effort")


def _without_nulls(value: Any, hidden: Container[str] = ()) -> Any:
    """The fields that say something, of what has fields."""
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if v is not None and k not in hidden}


def _function(tool: object) -> object:
    """A tool, or the choice of one, with its fields one level deeper."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _functions(tools: object) -> object:
    return list(map(_function, tools)) if isinstance(tools, list) else tools


def _wants_scores(include: object) -> bool:
    if not isinstance(include, list) or {*map(str, include)} - {_SCORES, _THOUGHTS}:
        raise ValueError(f"must be a list with {_SCORES} or nothing")
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
            if item.reasoning == "" and item.model_fields_set == {*_THOUGHT}:
                continue
            message, before = item.as_dict(), merged[-1] if merged else {}
            if "tool_calls" in message and before.get("role") == "assistant":
                calls = [*before.get("tool_calls", ()), *message["tool_calls"]]
                merged[-1] = {**before, "tool_calls": calls}
            else:
                merged.append(message)
        return [merged]


def new_form(model: str, request: Settings, body: dict[str, Any]) -> Form | ResponseForm:
    """The form of the answers to a request, which came as `body`."""
    is_response = isinstance(request, Responses)
    return ResponseForm(model, body) if is_response else Form(model, request)


class ResponseForm:
    """A response, whole and as events. Each item of its output is a message or a call."""

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        about = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
        repeated = {name: body[name] for name in _REPEATED if body.get(name) is not None}
        self._same = {**about, **_FIXED, **_REPEATED, **repeated, "model": model}
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # Is the last item being written?
        self._num_events = 0
        self._scores: list[TokenScore] = []  # Of tokens whose text has not come yet.
        self._finish_reason: str | None = None

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        for piece in pieces:
            self.chunk(piece)
        list(self._ended())
        return self._response(self._status, usage)

    def chunk(self, piece: Piece) -> bytes:
        """The events of some more text, or of the beginning."""
        if piece.is_first:
            response = self._response("in_progress")
            names = ("response.created", "response.in_progress")
            return b"".join(self._event(name, response=response) for name in names)
        self._finish_reason = piece.finish_reason
        self._scores += piece.scores
        events = list(self._text(piece.text)) if piece.text else []
        for part in piece.calls:
            events += self._call(part)
        return b"".join(events)

    def end(self, usage: dict[str, Any]) -> bytes:
        events = list(self._ended())
        response = self._response(self._status, usage)
        return b"".join([*events, self._event(f"response.{self._status}", response=response)])

    def failed(self, error: RequestError) -> bytes:
        about = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response("failed"), "error": about}
        return self._event("response.failed", response=response)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = {"status": status, "incomplete_details": reason, "output": self._items}
        return {**self._same, **output, "usage": usage and _usage(usage)}

    def _text(self, text: str) -> Iterator[bytes]:
        if not self._is_open or self._items[-1]["type"] != "message":
            yield from self._open("msg", type="message", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._of_item("content_part.added", content_index=0, part=part)
            self._items[-1]["content"].append(part)
        part, scores = self._items[-1]["content"][0], entries_of(self._scores, no_bytes=[])
        self._scores = []
        part["text"] += text
        part["logprobs"] += scores
        told = {"content_index": 0, "delta": text, "logprobs": scores}
        yield self._of_item("output_text.delta", **told)

    def _call(self, part: dict[str, Any]) -> Iterator[bytes]:
        function = part["function"]
        self._scores = []  # A call has no place for the scores of its tokens.
        if "id" in part:
            about = {"call_id": part["id"], "name": function["name"], "arguments": ""}
            yield from self._open("fc", type="function_call", **about)
        if more := function["arguments"]:
            self._items[-1]["arguments"] += more
            yield self._of_item("function_call_arguments.delta", delta=more)

    def _open(self, prefix: str, **item: object) -> Iterator[bytes]:
        yield from self._closed("completed")
        self._items.append({"id": _id(prefix), "status": "in_progress", **item})
        self._is_open = True
        yield self._of_item("output_item.added", item=self._items[-1])

    def _ended(self) -> Iterator[bytes]:
        if not self._items or (self._scores and self._items[-1]["type"] == "message"):
            yield from self._text("")
        is_whole = self._items[-1]["type"] != "message" and _is_json(self._items[-1]["arguments"])
        yield from self._closed("completed" if is_whole else self._status)

    def _closed(self, status: str) -> Iterator[bytes]:
        if not self._is_open:
            return
        item = self._items[-1]
        item["status"], self._is_open = status, False
        if item["type"] == "message":
            (part,) = item["content"]
            told = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield self._of_item("output_text.done", **told)
            yield self._of_item("content_part.done", content_index=0, part=part)
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("function_call_arguments.done", **told)
        yield self._of_item("output_item.done", item=item)

    def _of_item(self, name: str, /, **told: object) -> bytes:
        about = {"output_index": len(self._items) - 1}
        if "item" not in told:
            about |= {"item_id": self._items[-1]["id"]}
        return self._event(f"response.{name}", **about, **told)

    def _event(self, name: str, /, **told: object) -> bytes:
        about = {"type": name, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {name}\n".encode() + event({**about, **told})


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (RecursionError, ValueError):
        return False
    return True


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }

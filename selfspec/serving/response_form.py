"""The form of OpenAI's responses, whole and as the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from selfspec.serving.fields import RequestError
from selfspec.serving.replies import Form, Piece, entries_of, event
from selfspec.serving.responses import Responses
from selfspec.serving.settings import Settings

if TYPE_CHECKING:
    from selfspec.batch.answers import TokenScore

# What a response says of its request, which may name some of it itself.
_REPEATED: dict[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p")),
    **dict.fromkeys(("error", "previous_response_id")),
    "metadata": {},
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "background": False,
}


def new_form(model: str, request: Settings, body: dict[str, Any]) -> Form | ResponseForm:
    """The form of the answers to a request, which came as `body`."""
    is_response = isinstance(request, Responses)
    return ResponseForm(model, body) if is_response else Form(model, request)


class ResponseForm:
    """A response, whole and as events. Each item of its output is a message or a call."""

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        about = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
        repeated = {name: body[name] for name in _REPEATED if body.get(name) is not None}
        self._same = {**about, **_REPEATED, **repeated, "model": model, "store": False}
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # Is the last item being written?
        self._num_events = 0
        self._scores: list[TokenScore] = []  # Scores of tokens whose text has not come yet.
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
        fields = {"content_index": 0, "delta": text, "logprobs": scores}
        yield self._of_item("output_text.delta", **fields)

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
            fields = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield self._of_item("output_text.done", **fields)
            yield self._of_item("content_part.done", content_index=0, part=part)
        else:
            fields = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("function_call_arguments.done", **fields)
        yield self._of_item("output_item.done", item=item)

    def _of_item(self, name: str, /, **fields: object) -> bytes:
        about = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            about |= {"item_id": self._items[-1]["id"]}
        return self._event(f"response.{name}", **about, **fields)

    def _event(self, name: str, /, **fields: object) -> bytes:
        about = {"type": name, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {name}\n".encode() + event({**about, **fields})


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

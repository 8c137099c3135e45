"""The forms of OpenAI's answers: chat completions and completions, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from selfspec.serving.asked import Asked, Rules, read_chat, read_completion
from selfspec.serving.exchange import Piece, Usage

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Kind:
    """What one of the two protocols reads and writes."""

    read: Callable[[Any, Rules], Asked]
    prefix: str
    whole: str
    chunk: str
    is_chat: bool


CHAT = Kind(read_chat, "chatcmpl", "chat.completion", "chat.completion.chunk", True)
COMPLETION = Kind(read_completion, "cmpl", "text_completion", "text_completion", False)


class Form:
    """The answer to one request."""

    def __init__(self, kind: Kind, model: str) -> None:
        self.kind = kind
        self._same = {
            "id": f"{kind.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[Piece], usage: Usage) -> dict[str, Any]:
        """All choices at once."""
        found = [self._choice(piece, whole=True) for piece in choices]
        return {**self._head(self.kind.whole), "choices": found, "usage": _usage(usage)}

    def openings(self, num_choices: int) -> list[dict[str, Any]]:
        """The chunks that say who speaks, before any text."""
        if not self.kind.is_chat:
            return []
        return [
            self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})
            for index in range(num_choices)
        ]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A chunk for some text, and one for the end."""
        text, end = piece._replace(finish_reason=None), piece._replace(text="")
        parts = [text] * bool(text.text) + [end] * (end.finish_reason is not None)
        return [self._chunk(self._choice(part)) for part in parts]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, if the client asked for it."""
        return {**self._head(self.kind.chunk), "choices": [], "usage": _usage(usage)}

    def _head(self, name: str) -> dict[str, Any]:
        return {"object": name, **self._same}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        rest = {"logprobs": None, "finish_reason": None}
        return {**self._head(self.kind.chunk), "choices": [rest | choice]}

    def _choice(self, piece: Piece, *, whole: bool = False) -> dict[str, Any]:
        says: dict[str, Any] = {"text": piece.text}
        if self.kind.is_chat and whole:
            says = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        elif self.kind.is_chat:
            says = {"delta": {"content": piece.text} if piece.text else {}}
        end = {"logprobs": None, "finish_reason": piece.finish_reason}
        return {"index": piece.choice, **says, **end}


def event(data: dict[str, Any]) -> bytes:
    """One event of a stream, as `text/event-stream` wants it."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_new_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_new_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.num_accepted,
            "rejected_prediction_tokens": usage.num_rejected,
        },
    }

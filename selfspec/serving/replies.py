"""The forms of OpenAI's answers: chat completions and completions, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.serving.schema import RequestError

if TYPE_CHECKING:
    from selfspec.batch import Answer

DONE = b"data: [DONE]\n\n"


class Piece(NamedTuple):
    """Some more text of a choice; the last piece says why the text ended."""

    choice: int
    text: str
    finish_reason: str | None


class Form:
    """The answer to one request, to a chat completion or to a completion."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._whole = "chat.completion" if is_chat else "text_completion"
        self._chunk = "chat.completion.chunk" if is_chat else "text_completion"
        self._same = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """All choices at once."""
        choices = []
        for piece in pieces:
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            said = {"message": message} if self._is_chat else {"text": piece.text}
            choices.append(_choice(piece, said))
        return {"object": self._whole, **self._same, "choices": choices, "usage": usage}

    def openings(self, num_choices: int) -> list[bytes]:
        """The chunks that say who speaks, before any text."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        pieces = [Piece(choice, "", None) for choice in range(num_choices if self._is_chat else 0)]
        return [self._event([_choice(piece, delta)]) for piece in pieces]

    def chunks(self, piece: Piece) -> list[bytes]:
        """A chunk for some text, and one for the end."""
        text, end = piece._replace(finish_reason=None), piece._replace(text="")
        parts = [text] * bool(piece.text) + [end] * (piece.finish_reason is not None)
        return [self._event([_choice(part, self._said(part.text))]) for part in parts]

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, if the client asked for it."""
        return self._event([], usage=usage)

    def _said(self, text: str) -> dict[str, Any]:
        if self._is_chat:
            return {"delta": {"content": text} if text else {}}
        return {"text": text}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({"object": self._chunk, **self._same, "choices": choices, **more})


def event(data: dict[str, Any]) -> bytes:
    """One event of a stream, as `text/event-stream` wants it."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def error_body(error: RequestError) -> dict[str, Any]:
    """What a client is told that goes wrong, in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    told = {"message": str(error), "type": kind, "param": error.field, "code": error.code}
    return {"error": told}


def _choice(piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
    end = {"logprobs": None, "finish_reason": piece.finish_reason}
    return {"index": piece.choice, **said, **end}


def usage_of(num_prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """How many tokens a request took, and how many of a prediction came true."""
    num_new_tokens = sum(len(each.ids) for each in answers)
    drafted, accepted = (
        sum(getattr(each.stats, name)["prediction"] for each in answers)
        for name in ("drafted_by_source", "accepted_by_source")
    )
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }

"""The forms of OpenAI's answers: chat completions and completions, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.serving.fields import RequestError
from selfspec.serving.schema import Chat, TextRequest
from selfspec.serving.settings import Settings

if TYPE_CHECKING:
    from selfspec.batch import Answer
    from selfspec.batch.answers import TokenScore

_DONE = b"data: [DONE]\n\n"


class Piece(NamedTuple):
    """Some more text of a choice, or a part of a call. The last piece says why the choice ended.

    `calls` are parts of calls of tools, as OpenAI streams them, and `scores` those of its tokens.
    """

    choice: int
    text: str
    finish_reason: str | None = None
    calls: Sequence[dict[str, Any]] = ()
    scores: Sequence[TokenScore] = ()
    is_first: bool = False


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice joined into one, with whole calls."""
    calls: list[dict[str, Any]] = []
    for part in chain.from_iterable(piece.calls for piece in pieces):
        if "id" in part:
            calls.append({name: value for name, value in part.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    text = "".join(piece.text for piece in pieces)
    scores = [score for piece in pieces for score in piece.scores]
    return Piece(pieces[0].choice, text, pieces[-1].finish_reason, calls, scores, is_first=True)


class Form:
    """The answer to a chat or a completion, whole or in chunks."""

    def __init__(self, model: str, request: Settings) -> None:
        self._is_chat = isinstance(request, Chat)
        self._object = "chat.completion" if self._is_chat else "text_completion"
        options = request.stream_options if isinstance(request, TextRequest) else None
        self._tells_usage = options is not None and options.include_usage
        self._same = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        number = attrgetter("choice")
        by_choice = groupby(sorted(pieces, key=number), number)
        choices = [self._choice(joined(list(of_choice)), "message") for _, of_choice in by_choice]
        return {"object": self._object, **self._same, "choices": choices, "usage": usage}

    def chunk(self, *pieces: Piece, **more: object) -> bytes:
        """One event of a stream."""
        name = f"{self._object}.chunk" if self._is_chat else self._object
        choices = [self._choice(piece, "delta") for piece in pieces]
        return event({"object": name, **self._same, "choices": choices, **more})

    def end(self, usage: dict[str, Any]) -> bytes:
        """The last events of a stream."""
        return (self.chunk(usage=usage) if self._tells_usage else b"") + _DONE

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that is broken off."""
        return event(error_body(error))

    def _choice(self, piece: Piece, where: str) -> dict[str, Any]:
        """A choice; the first piece of a chat's names the role."""
        about = {"index": piece.choice, "finish_reason": piece.finish_reason}
        if not self._is_chat:
            scores = _of_completion(piece.scores) if piece.scores else None
            return {**about, "text": piece.text, "logprobs": scores}
        message: dict[str, Any] = {"role": "assistant"} if piece.is_first else {}
        message["content"] = piece.text
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": piece.calls}
        entries = entries_of(piece.scores, no_bytes=None)
        scores = {"content": entries, "refusal": None} if entries else None
        return {**about, where: message, "logprobs": scores}


def entries_of(scores: Sequence[TokenScore], *, no_bytes: object) -> list[dict[str, Any]]:
    """The log probabilities of tokens, as in OpenAI's chats and responses.

    A part of a character has no bytes that are known: `no_bytes`.
    """

    def entry(score: TokenScore) -> dict[str, Any]:
        data = no_bytes if "\ufffd" in score.text else list(score.text.encode())
        return {"token": score.text, "logprob": score.logprob, "bytes": data}

    return [{**entry(score), "top_logprobs": list(map(entry, score.top))} for score in scores]


def _of_completion(scores: Sequence[TokenScore]) -> dict[str, Any]:
    """The log probabilities of a completion; a token is among its likeliest, as in vLLM."""
    # Where tokens have the same text, the likeliest counts: it is written last.
    tops = [(score, *score.top[::-1]) if score.logprob is not None else () for score in scores]
    texts = [score.text for score in scores]
    return {
        "tokens": texts,
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [{score.text: score.logprob for score in top} or None for top in tops],
    }


def event(data: dict[str, Any]) -> bytes:
    """One event of a stream, as `text/event-stream` has it."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def error_body(error: RequestError) -> dict[str, Any]:
    error_type = "invalid_request_error" if error.status < 500 else "server_error"
    about = {"message": str(error), "type": error_type, "param": error.field, "code": error.code}
    return {"error": about}


def usage_of(answers: Sequence[Answer], readers: Sequence[Answer]) -> dict[str, Any]:
    """How many tokens a request took, and how many of a prediction came true.

    `readers` has one of the answers to each prompt, so that each prompt counts once.
    """
    num_prompt_tokens = sum(answer.num_prompt_tokens for answer in readers)
    num_kept_tokens = sum(answer.stats.num_prompt_tokens_kept for answer in readers)
    num_new_tokens = sum(len(answer.ids) for answer in answers)
    drafted = sum(answer.stats.drafted_by_source["prediction"] for answer in answers)
    accepted = sum(answer.stats.accepted_by_source["prediction"] for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "prompt_tokens_details": {"cached_tokens": num_kept_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }

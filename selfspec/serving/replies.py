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
from selfspec.serving.schema import Chat, Settings, TextRequest

if TYPE_CHECKING:
    from selfspec.batch import Answer
    from selfspec.batch.token_scores import TokenScore

_DONE = b"data: [DONE]\n\n"


class Piece(NamedTuple):
    """Some more text of a choice, or a part of a call. The last piece says why the choice ended.

    `calls` are parts of calls of tools, as OpenAI streams them. If the request wants them, there
    are the `ids` and `scores` of its tokens, and the ids of the prompt in the first piece.
    """

    choice: int
    text: str
    finish_reason: str | None = None
    calls: Sequence[dict[str, Any]] = ()
    scores: Sequence[TokenScore] = ()
    ids: Sequence[int] = ()
    prompt_ids: Sequence[int] | None = None

    @property
    def is_first(self) -> bool:
        return not any(self[1:6])


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one, with whole calls."""
    calls: list[dict[str, Any]] = []
    for part in chain.from_iterable(piece.calls for piece in pieces):
        if "id" in part:
            calls.append({name: value for name, value in part.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return Piece(
        pieces[0].choice,
        "".join(piece.text for piece in pieces),
        pieces[-1].finish_reason,
        calls,
        scores=[score for piece in pieces for score in piece.scores],
        ids=[token for piece in pieces for token in piece.ids],
        prompt_ids=pieces[0].prompt_ids,
    )


class Form:
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
        """The answer to a request."""
        number = attrgetter("choice")
        by_choice = groupby(sorted(pieces, key=number), number)
        wholes = [joined(list(of_choice)) for _, of_choice in by_choice]
        choices = [self._choice(piece, "message", is_first=True) for piece in wholes]
        about = {"object": self._object, **self._same, **self._of_prompt(*wholes[:1])}
        return {**about, "choices": choices, "usage": usage}

    def chunk(self, *pieces: Piece, **more: object) -> bytes:
        """One event of a stream; the first one of a choice names the role."""
        name = f"{self._object}.chunk" if self._is_chat else self._object
        choices = [self._choice(piece, "delta", is_first=piece.is_first) for piece in pieces]
        about = {"object": name, **self._same, **self._of_prompt(*pieces)}
        return event({**about, "choices": choices, **more})

    def end(self, usage: dict[str, Any]) -> bytes:
        """The last events of a stream."""
        return (self.chunk(usage=usage) if self._tells_usage else b"") + _DONE

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that is broken off."""
        return event(error_body(error))

    def _of_prompt(self, *pieces: Piece) -> dict[str, Any]:
        """What a chat says of its one prompt; completions have it in their choices, as in vLLM."""
        ids = [piece.prompt_ids for piece in pieces if piece.prompt_ids is not None]
        return {"prompt_token_ids": ids[0]} if ids and self._is_chat else {}

    def _choice(self, piece: Piece, where: str, *, is_first: bool) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if piece.ids:
            end["token_ids"] = piece.ids
        if not self._is_chat:
            if piece.prompt_ids is not None:
                end["prompt_token_ids"] = piece.prompt_ids
            scores = _of_completion(piece) if piece.scores else None
            return {"index": piece.choice, "text": piece.text, "logprobs": scores, **end}
        role = {"role": "assistant"} if is_first else {}
        message: dict[str, Any] = {**role, "content": piece.text}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": piece.calls}
        scores = (
            {"content": entries_of(piece.scores, no_bytes=None), "refusal": None}
            if piece.scores
            else None
        )
        return {"index": piece.choice, where: message, "logprobs": scores, **end}


def entries_of(scores: Sequence[TokenScore], *, no_bytes: object) -> list[dict[str, Any]]:
    """The log probabilities of tokens, as in OpenAI's chats and responses.

    A part of a character has no bytes that are known: `no_bytes`.
    """

    def entry(score: TokenScore) -> dict[str, Any]:
        data = no_bytes if "\ufffd" in score.text else list(score.text.encode())
        return {"token": score.text, "logprob": score.logprob, "bytes": data}

    return [{**entry(score), "top_logprobs": list(map(entry, score.top))} for score in scores]


def _of_completion(piece: Piece) -> dict[str, Any]:
    """The log probabilities of a completion; a token is among its likeliest, as in vLLM."""
    scores = piece.scores
    # Of tokens with the same text, the likeliest one counts, which is the last one here.
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

    Of the answers to one prompt, one is among the `readers`, whose prompts count.
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

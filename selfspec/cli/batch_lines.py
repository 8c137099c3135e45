"""One line of a batch file: what it asks for, and what is written about its answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from selfspec.cli.errors import CliError
from selfspec.errors import unknown_name

if TYPE_CHECKING:
    from selfspec.batch import Answer

__all__ = ["Line", "checksum", "read_line"]

_RULE = (
    'a line must be {"prompt": ...}, {"messages": [...]} or {"custom_id": ..., "body": {...}}, '
    "each in JSON"
)
# The fields of a line, or of a body, that say how its answer is to be written.
_COUNTS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
_SETTINGS = (*_COUNTS, "seed", "stop", "temperature", "top_p")
# What a body may have beside these without any effect on the answer.
_IGNORED = ("messages", "metadata", "model", "prompt", "store", "user")


@dataclass(frozen=True)
class Line:
    """What a line asks for."""

    number: int  # counted from 1
    checksum: str
    name: Any  # its `custom_id` or `id`; None if it has none
    prompt: Any  # text, or a list of messages
    in_body: bool  # Is it in OpenAI's form? Then its answer is, too.
    seed: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # of `generate()`

    def answered(self, answer: Answer, model_name: str) -> str:
        """The line of the output file."""
        about = {"line": self.number, "input": self.checksum}
        written = self._response(answer, model_name) if self.in_body else self._plain(answer)
        stats = {
            "num_steps": answer.stats.num_steps,
            "tokens_per_step": round(answer.stats.tokens_per_step, 3),
            "seconds": round(sum(answer.stats.seconds.values()), 4),
        }
        fields = {**about, **written, "ids": answer.ids, "stats": stats}
        return json.dumps(fields, ensure_ascii=False) + "\n"

    def _plain(self, answer: Answer) -> dict[str, Any]:
        name = {} if self.name is None else {"id": self.name}
        return {
            **name,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_new_tokens": len(answer.ids),
        }

    def _response(self, answer: Answer, model_name: str) -> dict[str, Any]:
        is_text = isinstance(self.prompt, str)
        said = {"text": answer.text}
        message = {"message": {"role": "assistant", "content": answer.text}}
        num_prompt, num_new = answer.num_prompt_tokens, len(answer.ids)
        body = {
            "object": "text_completion" if is_text else "chat.completion",
            "model": model_name,
            "choices": [
                {
                    "index": 0,
                    **(said if is_text else message),
                    "finish_reason": answer.finish_reason,
                }
            ],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_new,
                "total_tokens": num_prompt + num_new,
            },
        }
        response = {"status_code": 200, "body": body}
        return {"custom_id": self.name, "response": response, "error": None}


def checksum(data: bytes) -> str:
    """Says whether a line is still the one that was answered.

    >>> checksum(b'{"prompt": "a"}') == checksum(b' {"prompt": "a"}  ')
    True
    """
    return hashlib.sha256(data.strip()).hexdigest()[:12]


def read_line(number: int, data: bytes) -> Line:
    """What a line asks for; raises `CliError` if that can't be understood."""
    try:
        value = json.loads(data)
    except ValueError as error:  # UnicodeDecodeError is one, too.
        raise CliError(f"{_RULE} (got {_shown(data.decode(errors='replace'))})") from error
    if not isinstance(value, Mapping):
        raise CliError(f"{_RULE} (got {_shown(value)})")
    in_body = "body" in value
    asked = value["body"] if in_body else value
    if not isinstance(asked, Mapping):
        raise CliError(f"body must be a table (got {_shown(asked)})")
    if in_body:
        for name in asked:
            if name not in (*_SETTINGS, *_IGNORED):
                raise CliError(unknown_name("field of body", str(name), (*_SETTINGS, *_IGNORED)))
    name = value.get("custom_id", value.get("id"))
    seed = _seed(asked)
    return Line(number, checksum(data), name, _prompt(asked), in_body, seed, _arguments(asked))


def _prompt(asked: Mapping[str, Any]) -> Any:
    prompt, messages = asked.get("prompt"), asked.get("messages")
    if isinstance(prompt, str) and messages is None:
        if not prompt:
            raise CliError("prompt must not be empty; write some text")
        return prompt
    if isinstance(messages, list) and messages and prompt is None:
        return messages
    raise CliError(f"{_RULE}, with text or a list of messages (got {_shown(dict(asked))})")


def _arguments(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `generate()` that a line sets for itself."""
    arguments: dict[str, Any] = {}
    for name in _COUNTS:
        if (number := asked.get(name)) is not None:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise CliError(f"{name} must be a whole number >= 1 (got {_shown(number)})")
            arguments["max_new_tokens"] = number
    if (temperature := _real(asked, "temperature", 0)) is not None:
        arguments["do_sample"] = temperature > 0
        arguments |= {"temperature": temperature} if temperature else {}
    if (top_p := _real(asked, "top_p", 0)) is not None:
        arguments["top_p"] = top_p
    if (stop := asked.get("stop")) is not None:
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise CliError(f"stop must be text, or a list of texts (got {_shown(stop)})")
        arguments |= {"stop_strings": strings} if strings else {}
    return arguments


def _real(asked: Mapping[str, Any], name: str, least: float) -> float | None:
    value = asked.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise CliError(f"{name} must be a number >= {least} (got {_shown(value)})")
    return float(value)


def _seed(asked: Mapping[str, Any]) -> int | None:
    seed = asked.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise CliError(f"seed must be a whole number (got {_shown(seed)})")
    return seed


def _shown(value: Any) -> str:
    text = repr(value)
    return text[:80] + "…" * (len(text) > 80)

"""One line of a batch file: what it asks for, and what is written about its answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from selfspec.building.limits import choice_of
from selfspec.errors import CliError, unknown_name

if TYPE_CHECKING:
    from selfspec.batch import Answer

_RULE = (
    'a line must be {"prompt": ...}, {"messages": [...]} or {"custom_id": ..., "body": {...}}, '
    "each in JSON"
)
# What other programs call a prompt. It is not read as one: an output of ours has a text, too.
_OTHER_FORMS = {
    "text": "rename it to 'prompt' if it is a text to continue",
    "turns": "write the turns as messages with role and content",
}
# The fields of a line, or of a body, that say how its answer is to be written.
_COUNTS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
_SETTINGS = (*_COUNTS, "seed", "stop", "temperature", "top_p")
_LARGEST = 1e9  # of a temperature; also keeps infinity out
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
    length_setting: str = "--max-new-tokens"  # what says how long the answer may be

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
        message = {"message": {"role": "assistant", "content": answer.text}}
        said = {"text": answer.text} if is_text else message
        num_prompt, num_new = answer.num_prompt_tokens, len(answer.ids)
        body = {
            "object": "text_completion" if is_text else "chat.completion",
            "model": model_name,
            "choices": [{"index": 0, **said, "finish_reason": answer.finish_reason}],
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
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError.
        start = data[:200].decode(errors="replace")  # A line may be as long as it likes.
        raise CliError(f"{_RULE} (got {_shown(start)})") from error
    if not isinstance(value, Mapping):
        raise CliError(f"{_RULE} (got {_shown(value)})")
    in_body = "body" in value
    asked = value["body"] if in_body else value
    if not isinstance(asked, Mapping):
        raise CliError(f"body must be a table (got {_shown(asked)})")
    known = (*_SETTINGS, *_IGNORED)
    for name in asked:
        # Beside a prompt there may be fields of one's own, but hardly one like "temprature".
        if name not in known and (in_body or get_close_matches(name, _SETTINGS, cutoff=0.85)):
            raise CliError(unknown_name("field" + " of body" * in_body, name, known))
    return Line(
        number,
        checksum(data),
        _name(value),
        _prompt(asked),
        in_body,
        _seed(asked),
        _arguments(asked),
        *[name for name in reversed(_COUNTS) if asked.get(name) is not None][:1],
    )


def _name(value: Mapping[str, Any]) -> Any:
    """What the line is called by whoever wrote it, which its answer repeats."""
    name = value.get("custom_id", value.get("id"))
    if name is not None and not isinstance(name, (str, int)):
        raise CliError(f"custom_id and id must be text or a whole number (got {_shown(name)})")
    _check_unicode("custom_id or id", name)
    return name


def _check_unicode(name: str, text: Any) -> None:
    """Refuses half of a character, which JSON can say and no file can hold."""
    try:
        str(text).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CliError(f"{name} must be Unicode text (got {_shown(text)})") from error


def _prompt(asked: Mapping[str, Any]) -> Any:
    prompt, messages = asked.get("prompt"), asked.get("messages")
    if isinstance(prompt, str) and messages is None:
        if not prompt:
            raise CliError("prompt must not be empty; write some text")
        _check_unicode("prompt", prompt)
        return prompt
    if isinstance(messages, list) and messages and prompt is None:
        return messages
    for name, fix in _OTHER_FORMS.items():
        if name in asked and prompt is None and messages is None:
            raise CliError(f"{_RULE} (got {name!r}); {fix}")
    raise CliError(f"{_RULE}, with text or a list of messages (got {_shown(dict(asked))})")


def _arguments(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `generate()` that a line sets for itself."""
    arguments: dict[str, Any] = {}
    for name in _COUNTS:
        if (number := asked.get(name)) is not None:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise CliError(f"{name} must be a whole number >= 1 (got {_shown(number)})")
            arguments["max_new_tokens"] = number
    if (temperature := _real(asked, "temperature")) is not None:
        arguments |= choice_of(temperature)
    if (top_p := _real(asked, "top_p")) is not None:
        arguments["top_p"] = top_p
    if (stop := asked.get("stop")) is not None:
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise CliError(f"stop must be text, or a list of texts (got {_shown(stop)})")
        _check_unicode("stop", "".join(strings))
        arguments |= {"stop_strings": strings} if strings else {}
    return arguments


def _real(asked: Mapping[str, Any], name: str) -> float | None:
    value = asked.get(name)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _LARGEST:
        raise CliError(f"{name} must be a number >= 0 (got {_shown(value)})")
    return float(value)


def _seed(asked: Mapping[str, Any]) -> int | None:
    seed = asked.get("seed")
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise CliError(f"seed must be a whole number from 0 to 2**63 - 1 (got {_shown(seed)})")
    return seed


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deeply"
    return text[:80] + "…" * (len(text) > 80)

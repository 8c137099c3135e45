"""What a request wants to be answered: messages, texts or token ids, and a prediction."""

from __future__ import annotations

from typing import Any

from selfspec.serving.fields import Fields, checked_text
from selfspec.serving.refusal import Refused

MAX_CHOICES = 16  # Answers to one request.
_ROLES = ("system", "developer", "user", "assistant")


def prediction_of(fields: Fields) -> str | None:
    given = fields.get("prediction")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "content" or len(given) != 2:
        raise fields.refuse("prediction", "an object with type: 'content', and content")
    return _content("prediction", given.get("content"))


def messages_of(fields: Fields) -> list[dict[str, str]]:
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise fields.refuse("messages", "a list with at least one message")
    return [_message(number, each) for number, each in enumerate(given)]


def _message(number: int, given: Any) -> dict[str, str]:
    where = f"messages[{number}]"
    if not isinstance(given, dict) or set(given) - {"role", "content", "name"}:
        rule = "must be an object with role and content, and perhaps name"
        raise Refused(f"{where} {rule} (got {given!r:.80})", field="messages")
    role = given.get("role")
    if role not in _ROLES:
        roles = f"{where}.role must be one of {', '.join(_ROLES)}"
        raise Refused(f"{roles} (got {role!r:.40})", field="messages")
    content = _content(f"{where}.content", given.get("content"), "messages")
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(where: str, given: Any, field: str | None = None) -> str:
    """Text, or the texts of a list of parts, one behind the other."""
    parts = given if isinstance(given, list) else [{"type": "text", "text": given}]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            rule = "must be text, or a list of parts with type: 'text', and text"
            raise Refused(f"{where} {rule} (got {part!r:.80})", field=field or where)
        try:
            texts.append(checked_text(where, part["text"]))
        except Refused as error:
            raise Refused(str(error), field=field or where) from None
    return "".join(texts)


def prompts_of(fields: Fields, vocab_size: int) -> list[Any]:
    given = fields.get("prompt")
    rule = f"text, token ids, or a list of 1 to {MAX_CHOICES} of these"
    prompts = given if isinstance(given, list) and not _are_ids(given) else [given]
    if not prompts:
        raise fields.refuse("prompt", rule)
    if len(prompts) > MAX_CHOICES:
        raise Refused(f"prompt must be {rule} (got {len(prompts)})", field="prompt")
    return [_prompt(fields, each, rule, vocab_size) for each in prompts]


def _prompt(fields: Fields, given: Any, rule: str, vocab_size: int) -> Any:
    if isinstance(given, str):
        return checked_text("prompt", given)
    if not isinstance(given, list) or not _are_ids(given):
        raise fields.refuse("prompt", rule)
    for each in given:
        if not 0 <= each < vocab_size:
            rule = f"prompt must hold ids of the model's {vocab_size} tokens"
            raise Refused(f"{rule} (got {each!r:.40})", field="prompt")
    return given


def _are_ids(given: list[Any]) -> bool:
    """Whole numbers, one at least."""
    return bool(given) and all(type(each) is int for each in given)

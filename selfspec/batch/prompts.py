"""From a prompt as a user gives it to its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.errors import UnsupportedError

# A text, the messages of a conversation, or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

_RULE = "a prompt must be text, a list of messages with role and content, or token ids"


def encoded(prompt: Any, tokenizer: Any) -> list[int]:
    """The ids of a prompt; messages are put into the tokenizer's chat template."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt)["input_ids"] if prompt else []
        return ids
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(given, (list, tuple)):
        raise UnsupportedError(f"{_RULE} (got {prompt!r:.80})")
    if given and all(isinstance(each, Mapping) for each in given):
        return _from_messages(given, tokenizer)
    for each in given:
        if isinstance(each, bool) or not isinstance(each, int):
            raise UnsupportedError(f"{_RULE} (got {each!r:.80} in a list)")
    return list(given)


def _from_messages(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    for each in messages:
        if not isinstance(each.get("role"), str) or not isinstance(each.get("content"), str):
            raise UnsupportedError(f"{_RULE} (got the message {dict(each)!r:.80})")
    if not tokenizer.chat_template:
        raise UnsupportedError(
            "messages need a tokenizer with a chat template, and this one has none; give text "
            "instead"
        )
    return list(_templated([dict(each) for each in messages], tokenizer))


def _templated(messages: list[dict[str, Any]], tokenizer: Any) -> Sequence[int]:
    from jinja2 import TemplateError

    try:
        ids: Sequence[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    except (TemplateError, RecursionError) as error:
        raise UnsupportedError(
            f"the messages must be what the model's chat template takes (got: {error})"
        ) from error
    return ids

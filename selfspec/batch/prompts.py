"""From a prompt as a user gives it to its tokens, and to the images that belong to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from selfspec.compat.generation import KV_NAMES
from selfspec.errors import UnsupportedError

# A text, the messages of a conversation, token ids, or what a processor makes of a prompt.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Mapping[str, Any]

_RULE = "a prompt must be text, a list of messages with role and content, or token ids"
_FROM_PROCESSOR = (
    "inputs of a processor must have input_ids with one row, such as "
    "processor(..., return_tensors='pt') makes of one prompt"
)


def inputs_of(
    prompt: Any, processor: Any, tools: list[dict[str, Any]] | None = None
) -> list[int] | dict[str, Any]:
    """The ids of a prompt, or the inputs that the model's processor makes of it.

    With a processor, messages may have images, as its chat template takes them. With a tokenizer in
    its place, prompts are text.
    """
    if isinstance(prompt, Mapping):
        return _one_row(prompt)
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        return encoded(prompt, processor, tools)
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
        return _one_row(_in_parts(prompt, processor, tools))
    return encoded(prompt, tokenizer)


def _one_row(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of one prompt, checked, without padding."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1:
        got = f"of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else f"{ids!r:.80}"
        raise UnsupportedError(f"{_FROM_PROCESSOR} (got input_ids {got})")
    has_kv = any(inputs.get(name) is not None for name in KV_NAMES)
    if has_kv or mask is None or mask.shape != ids.shape or mask.all():
        return dict(inputs)
    # A row that joins others can't be padded, and a single prompt needs no padding.
    start = int((mask.cumsum(-1) == 0).sum())
    if not mask[:, start:].all():
        raise UnsupportedError("a prompt may be padded on its left alone (got padding elsewhere)")
    return {
        name: each[:, start:] if _has_columns(each, ids) else each for name, each in inputs.items()
    }


def _has_columns(value: Any, ids: torch.Tensor) -> bool:
    """Does a tensor have one value, or several, for each token?"""
    return isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape


def _in_parts(
    messages: Sequence[Mapping[str, Any]], processor: Any, tools: list[dict[str, Any]] | None
) -> Mapping[str, Any]:
    """What a processor makes of messages. Many templates skip a content that is text."""
    _check_messages(messages, (str, list), processor)
    messages, options = _with_tools(list(map(_in_part, messages)), processor, tools)
    options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs: Mapping[str, Any] = _templated(list(map(_in_part, messages)), processor, **options)
    return inputs


def _in_part(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


def encoded(prompt: Any, tokenizer: Any, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """The ids of a prompt; messages are put into the tokenizer's chat template, with any tools."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt)["input_ids"] if prompt else []
        return ids
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(given, (list, tuple)):
        raise UnsupportedError(f"{_RULE} (got {prompt!r:.80})")
    if given and all(isinstance(each, Mapping) for each in given):
        return _from_messages(given, tokenizer, tools)
    for each in given:
        if isinstance(each, bool) or not isinstance(each, int):
            raise UnsupportedError(f"{_RULE} (got {each!r:.80} in a list)")
    return list(given)


def _from_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    _check_messages(messages, str, tokenizer)
    messages, options = _with_tools([dict(each) for each in messages], tokenizer, tools)
    return list(_templated(messages, tokenizer, return_dict=False, **options))


def _check_messages(messages: Sequence[Mapping[str, Any]], kinds: Any, owner: Any) -> None:
    for each in messages:
        if not isinstance(each.get("role"), str) or not isinstance(each.get("content"), kinds):
            raise UnsupportedError(f"{_RULE} (got the message {dict(each)!r:.80})")
    if not owner.chat_template:
        raise UnsupportedError(
            "messages need a tokenizer with a chat template, and this one has none; give text "
            "instead"
        )


def _with_tools(
    messages: list[dict[str, Any]], owner: Any, tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and options for a template. If it ignores tools, a first message names them."""
    if not tools:
        return messages, {}
    plain = _templated(messages, owner, tokenize=False)
    if _templated(messages, owner, tokenize=False, tools=tools) != plain:
        return messages, {"tools": tools}
    text = "You may call these functions:\n" + json.dumps(tools)
    return [{"role": "system", "content": text}, *messages], {}


def _templated(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except (TemplateError, RecursionError) as error:
        raise UnsupportedError(
            f"the messages must be what the model's chat template takes (got: {error})"
        ) from error

"""From a prompt as a user gives it to its tokens, and to the images that belong to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from selfspec.compat.generation import KV_NAMES
from selfspec.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

# A text, the messages of a conversation, token ids, or what a processor makes of a prompt.
PromptLike = str | Sequence[Mapping[str, Any]] | Sequence[int] | Mapping[str, Any]

_RULE = "a prompt must be text, a list of messages with role and content, or token ids"
_FROM_PROCESSOR = (
    "inputs of a processor must have input_ids with one row, such as "
    "processor(..., return_tensors='pt') makes of one prompt"
)


def inputs_of(
    prompt: Any,
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int] | dict[str, Any]:
    """The ids of a prompt, or the inputs that the model's processor makes of it.

    With a processor, messages may have images, as its chat template takes them. With a tokenizer in
    its place, prompts are text. `options` are the template's, or for a text the tokenizer's.
    """
    if isinstance(prompt, Mapping):
        return _one_row(prompt)
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None:
        return encoded(prompt, processor, tools, **options)
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
        return _one_row(_from_messages(prompt, processor, tools, options, in_parts=True))
    return encoded(prompt, tokenizer, **options)


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
    cut = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape:
            cut[name] = value[:, start:]  # It has one number, or several, for each token.
    return cut


def encoded(
    prompt: Any,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """The ids of a prompt; messages are put into the tokenizer's chat template, with any tools."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt, **options)["input_ids"] if prompt else []
        return ids
    parts = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(parts, (list, tuple)):
        raise UnsupportedError(f"{_RULE} (got {prompt!r:.80})")
    if parts and all(isinstance(part, Mapping) for part in parts):
        return list(_from_messages(parts, tokenizer, tools, options))
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int):
            raise UnsupportedError(f"{_RULE} (got {part!r:.80} in a list)")
    return list(parts)


def _from_messages(
    messages: Sequence[Mapping[str, Any]],
    owner: PreTrainedTokenizerBase | ProcessorMixin,
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    *,
    in_parts: bool = False,
) -> Any:
    """What a chat template makes of messages. If it ignores tools, a first message names them."""
    for message in messages:
        is_content = isinstance(message.get("content"), (str, list) if in_parts else str)
        if not isinstance(message.get("role"), str) or not is_content:
            raise UnsupportedError(f"{_RULE} (got the message {dict(message)!r:.80})")
    if not owner.chat_template:
        raise UnsupportedError(
            "messages need a tokenizer with a chat template, and this one has none; give text "
            "instead"
        )
    form: Callable[[Any], dict[str, Any]] = _in_parts if in_parts else dict
    shown = list(map(form, messages))
    if tools:
        plain = _templated(shown, owner, **options, tokenize=False)
        if _templated(shown, owner, **options, tokenize=False, tools=tools) != plain:
            options["tools"] = tools
        else:
            text = "You may call these functions:\n" + json.dumps(tools)
            shown.insert(0, form({"role": "system", "content": text}))
    if in_parts:
        options |= {"tokenize": True, "return_tensors": "pt"}
    return _templated(shown, owner, return_dict=in_parts, **options)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list, since many templates skip a content that is text."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


def _templated(
    messages: list[dict[str, Any]],
    owner: PreTrainedTokenizerBase | ProcessorMixin,
    **options: Any,
) -> Any:
    from jinja2 import TemplateError

    try:
        return owner.apply_chat_template(messages, **{"add_generation_prompt": True, **options})
    except (TemplateError, RecursionError) as error:
        raise UnsupportedError(
            f"the messages must be what the model's chat template takes (got: {error})"
        ) from error

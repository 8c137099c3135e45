"""From a prompt as a user gives it to its tokens, and to the images that belong to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

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

# What a model is told whose template knows no tools; `calls` reads such calls.
_TOOLS = """You may call these functions, as in
<tool_call>
{"name": "f", "arguments": {}}
</tool_call>
"""


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
    tokenizer = getattr(processor, "tokenizer", None)
    parts = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(parts, Mapping):
        return _one_row(parts)
    if isinstance(parts, str):
        return list((tokenizer or processor)(parts, **options)["input_ids"]) if parts else []
    if not isinstance(parts, (list, tuple)):
        raise UnsupportedError(f"{_RULE} (got {prompt!r:.80})")
    if parts and all(isinstance(part, Mapping) for part in parts):
        inputs = _from_messages(parts, processor, tools, options, in_parts=tokenizer is not None)
        return list(inputs) if tokenizer is None else _one_row(inputs)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int):
            raise UnsupportedError(f"{_RULE} (got {part!r:.80} in a list)")
    return list(parts)


def _one_row(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of one prompt, checked. A row that joins others can't be padded."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1:
        got = f"of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else f"{ids!r:.80}"
        raise UnsupportedError(f"{_FROM_PROCESSOR} (got input_ids {got})")
    if mask is not None and mask.shape == ids.shape and not mask.all():
        raise UnsupportedError("inputs of a processor must have no padding (got some)")
    return dict(inputs)


def _from_messages(
    messages: Sequence[Mapping[str, Any]],
    owner: PreTrainedTokenizerBase | ProcessorMixin,
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    *,
    in_parts: bool,
) -> Any:
    """Messages through a chat template. If it knows no tools, a first message names them."""
    for message in messages:
        is_content = isinstance(message.get("content"), (str, list) if in_parts else str)
        if not isinstance(message.get("role"), str) or not is_content:
            raise UnsupportedError(f"{_RULE} (got the message {dict(message)!r:.80})")
    form: Callable[[Any], dict[str, Any]] = _in_parts if in_parts else dict
    shown = list(map(form, messages))
    if tools and "tools" in str(owner.chat_template):
        options["tools"] = tools
    elif tools:
        shown.insert(0, form({"role": "system", "content": _TOOLS + json.dumps(tools)}))
    if in_parts:
        options |= {"tokenize": True, "return_tensors": "pt"}
    options = {"add_generation_prompt": True, "return_dict": in_parts, **options}
    return owner.apply_chat_template(shown, **options)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list, since many templates skip a content that is text."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}

"""Whether the plain steps of a model need more than ids, positions, mask and KV.

The forward of a draft gets none of it, so it must change nothing there. That is tried, since a name
does not tell: `token_type_ids` change nothing in the plain steps of Gemma 3, and much in those of
GPT-2.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import deepcopy
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel

from selfspec.compat.generation import (
    KV,
    kv_of,
    length_of_dropped_mask,
    read_prompt,
    update_arguments,
)
from selfspec.compat.kernels import is_out_of_memory
from selfspec.forward.inputs import NO_TOKENS, numbers_of_columns, other_inputs, plain_inputs


def of_plain_steps(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]
) -> Hashable:
    """What a verdict on these arguments holds for; None if there are only some that drafts follow.

    These are the names, and the values that tokens have in a plain step, since a model may take
    zeros for nothing. The sizes of images are no such values. Runs no forward.
    """
    if not (names := other_inputs(arguments)):
        return None
    step = _plain_step(model, input_ids, update_arguments(model, dict(arguments)))
    values = {
        name: tuple(sorted(set(value.flatten().tolist())))
        for name, value in other_inputs(step).items()
        if isinstance(value, torch.Tensor)
        and value.shape == (len(input_ids), 1)
        and not value.is_floating_point()
    }
    return tuple(sorted(names)), tuple(sorted(values.items()))


def missing_inputs_reason(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # (B, P)
    generation_config: GenerationConfig,
    arguments: dict[str, Any],  # those of the prompt
) -> str | None:
    """Why drafts can't do without these arguments; None if they can.

    Reads the prompt into a copy of the KV cache and compares a plain step with one that does
    without them. This is done once for such arguments, and takes as long as the prompt does.
    """
    arguments = {**arguments, KV: deepcopy(kv_of(arguments))}
    with torch.no_grad():
        outputs = read_prompt(model, input_ids, generation_config, dict(arguments))
        arguments = update_arguments(model, arguments, outputs=outputs)
        length = _length_of_text(input_ids, generation_config, arguments)
        kv = kv_of(arguments)
        # A decoder that looks at an encoder, as that of BLIP, puts its KV into one of two parts.
        if not hasattr(kv, "layers") or not numbers_of_columns(kv) <= {0, length}:
            return NO_TOKENS
        step = _plain_step(model, input_ids, arguments)
        needed = list(other_inputs(step))
        if not needed or _are_alike(model, step, needed):
            return None
        needed = [name for name in needed if not _are_alike(model, step, [name])] or needed
    return f"its plain steps need {', '.join(map(repr, needed))}, which drafts are not given"


def _plain_step(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]
) -> dict[str, Any]:
    return plain_inputs(model, pad(input_ids, (0, 1)), arguments)


def _length_of_text(
    input_ids: torch.Tensor, generation_config: GenerationConfig, arguments: dict[str, Any]
) -> int:
    """How many columns the prompt has, as its mask counts them."""
    if (mask := arguments.get("attention_mask")) is not None:
        return int(mask.shape[1]) - 1
    embeds = arguments.get("inputs_embeds")
    inputs = input_ids if embeds is None else embeds
    return length_of_dropped_mask(generation_config) or int(inputs.shape[1])


def _are_alike(model: PreTrainedModel, step: dict[str, Any], names: list[str]) -> bool:
    """Are the logits of a plain step the same, to the bit, without these arguments?"""
    without = {name: value for name, value in step.items() if name not in names}
    try:
        logits = _logits(model, without)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return torch.equal(_logits(model, step), logits)


def _logits(model: PreTrainedModel, step: dict[str, Any]) -> torch.Tensor:
    outputs = model(**{**step, KV: deepcopy(kv_of(step))}, return_dict=True)
    return outputs.logits[:, -1]  # type: ignore[no-any-return]

"""Reads a prompt, whole or in parts, into the KV cache on which drafts go on.

transformers asks the model only for the logits of the last token, and so do we. A hook keeps the
hidden states that enter the output head, so that the head can be run again over the last of them.
The logits of the whole prompt are never held at once, and the first token is chosen from exactly
the logits that transformers would have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from selfspec.compat.generation import (
    kv_of,
    mask_of_text,
    prefill,
    update_arguments,
)
from selfspec.compat.states import columns_of
from selfspec.forward.columns import Prefix, fill
from selfspec.forward.inputs import only_followed, other_inputs, plain_inputs
from selfspec.forward.model import at_output_head

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Where the logits of a whole prompt are asked for, it is read in parts of 128 tokens.
_PART_OF_LOGITS = 128
OnLogits = Callable[[int, torch.Tensor], None]  # The number of the first token; (B, L, V).


def plain_positions(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # (B, P)
    arguments: dict[str, Any],  # those of the step that reads the token after these
) -> torch.Tensor | None:
    """The position ids that the model's own code gives the plain step after a prompt, if any.

    A model may shift the positions in its arguments.
    """
    # Any token will do as the next one, since positions do not depend on it.
    return plain_inputs(model, pad(input_ids, (0, 1)), arguments).get("position_ids")


def placing_reason(positions: torch.Tensor | None, arguments: dict[str, Any]) -> str | None:
    """Why the nodes of a tree can't be given the positions of plain steps; None if they can."""
    if positions is not None:
        is_whole = not positions.is_floating_point() or bool((positions == positions.long()).all())
        return None if is_whole else "the positions of its plain steps are no whole numbers"
    if _is_padded(arguments):
        return "its plain steps are given no positions, and some columns are padding"
    if other_inputs(arguments):
        return "its plain steps are given no positions, and not all columns may be text"
    return None


def prompt_placing_reason(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]
) -> str | None:
    """The same for a prompt that was not read, after a trial has shown it for unpadded text.

    So a prompt of unpadded text is not asked for its positions before it was read.
    """
    if not (_is_padded(arguments) or other_inputs(arguments)):
        return None
    arguments = update_arguments(model, dict(arguments))
    return placing_reason(plain_positions(model, input_ids, arguments), arguments)


def _is_padded(arguments: dict[str, Any]) -> bool:
    mask = arguments.get("attention_mask")
    return mask is not None and not mask.all()


def next_positions(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    """(..., B, 1): the position ids of the rows' next tokens; columns, where none are given."""
    positions = plain_positions(model, input_ids, arguments)
    if positions is None:
        positions = input_ids.new_full((1, 1), columns_of(kv_of(arguments)))
    # The last position counts: Phi-3 reads all again where its rotary factors change.
    positions = positions.long()[..., -1:]
    return positions.expand(*positions.shape[:-2], len(input_ids), 1)


@dataclass(frozen=True)
class Prefilled:
    """A prompt that the model has read, with all that the first step needs."""

    input_ids: torch.Tensor  # (B, P)
    model_kwargs: dict[str, Any]  # those of the first step
    logits: torch.Tensor  # (B, V): those of the last token
    hidden: torch.Tensor | None = None  # (B, N, D): what entered the output head at the end

    @property
    def cache(self) -> Any:
        return kv_of(self.model_kwargs)

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """(B, P): which columns count; None where all do."""
        mask = mask_of_text(self.model_kwargs)
        # Older versions of transformers keep a mask that hides nothing.
        return None if mask is None or mask.all() else mask[:, :-1].bool()

    @cached_property
    def texts(self) -> list[list[int]]:
        """Each row's tokens, without padding."""
        if self.visible is None or not self.input_ids.shape[1]:
            return self.input_ids.tolist()
        pairs = zip(self.input_ids, self.visible, strict=True)
        return [ids[seen[-len(ids) :]].tolist() for ids, seen in pairs]

    def repeated(self, number: int) -> Prefilled:
        """The same for a number of copies of every row; its cache gets them too."""
        self.cache.batch_repeat_interleave(number)

        def copies(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return value.repeat_interleave(number, dim=0) if is_tensor else value

        kwargs = {name: copies(value) for name, value in self.model_kwargs.items()}
        return Prefilled(copies(self.input_ids), kwargs, copies(self.logits), copies(self.hidden))


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptPlan:
    """What is read of one call.

    It goes through the model as with transformers, whose own code splits what it splits. The parts
    of a longer one go through it as with transformers' `prefill_chunk_size`.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor  # (B, P)
    arguments: dict[str, Any]  # What the model is given beside the ids.
    generation_config: GenerationConfig
    num_samples: int = 1  # How many rows are like each of these.
    on_logits: OnLogits | None = None  # Gets the logits of all tokens, part by part.
    read_at_once_reason: str | None = None  # Why the model can't read it in parts.

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def cache(self) -> Any:
        return kv_of(self.arguments)

    @property
    def is_read_at_once(self) -> bool:
        """Must it be read in one part, as one whose images have their places in the whole?"""
        embeds, chunk = (
            self.arguments.get("inputs_embeds"),
            self.generation_config.prefill_chunk_size,
        )
        is_text = embeds is None and chunk is None and not other_inputs(self.arguments)
        return not is_text or self.read_at_once_reason is not None


@dataclass
class ReadSoFar:
    """How far a prompt was read, here or for another text."""

    num_columns: int = 0
    num_kept: int = 0  # How many of them were read for another text.
    num_states: int = 0  # How many of the last hidden states are kept.
    hidden: torch.Tensor | None = None  # (B, N, D): those that have entered the output head
    logits: torch.Tensor | None = None  # (1, V): those at its end, if another text has shown them

    @classmethod
    def of_prefix(cls, plan: PromptPlan, beginning: Prefix) -> ReadSoFar:
        """Lets the plan's empty cache hold what was read for another text."""
        fill(plan.cache, beginning)
        number = beginning.num_columns
        return cls(num_columns=number, num_kept=number, logits=beginning.logits)


def read_prompt(
    plan: PromptPlan, so_far: ReadSoFar, num_tokens: int | None = None, *, num_states: int = 0
) -> Prefilled | None:
    """Reads `num_tokens` more of a prompt, or all that is left; returns it at its end.

    `num_states` of the last hidden states are kept.
    """
    so_far.num_states = max(so_far.num_states, num_states)
    is_whole = num_tokens is None or plan.is_read_at_once
    end = plan.num_tokens if is_whole else so_far.num_columns + (num_tokens or 0)
    end = min(end, plan.num_tokens)
    in_steps = plan.on_logits is not None and not plan.is_read_at_once
    logits, outputs = so_far.logits, None
    while logits is None:
        part_end = min(so_far.num_columns + _PART_OF_LOGITS, end) if in_steps else end
        outputs = _read_part(plan, so_far, part_end)
        so_far.num_columns = part_end
        if part_end == end:
            logits = outputs.logits[:, -1].clone()  # A view would keep the whole prompt's.
    if end < plan.num_tokens:
        return None
    arguments = update_arguments(plan.model, dict(plan.arguments), outputs=outputs)
    if not plan.model.config.is_encoder_decoder:  # Chains get what plain steps get.
        arguments = only_followed(arguments)
    hidden, so_far.hidden = so_far.hidden, None  # Dropped when the prompt was learned.
    prefilled = Prefilled(plan.input_ids, arguments, logits, hidden)
    return prefilled if plan.num_samples == 1 else prefilled.repeated(plan.num_samples)


def _read_part(plan: PromptPlan, so_far: ReadSoFar, end: int) -> Any:
    """The outputs of the forward over the next columns, up to `end`."""
    start, arguments = so_far.num_columns, dict(plan.arguments)
    if end - start < plan.num_tokens:
        arguments = part_of(arguments, start, end)
    keeps_states = so_far.num_states and arguments.get("logits_to_keep") == 1
    gives_logits = plan.on_logits is not None
    if "logits_to_keep" in arguments and (keeps_states or gives_logits):
        arguments["logits_to_keep"] = 0
    keep = partial(_keep_last, so_far, gives_logits)
    with at_output_head(plan.model, keep) if keeps_states else nullcontext():
        ids = plan.input_ids[:, start:end]
        outputs = prefill(plan.model, ids, plan.generation_config, arguments)
    if plan.on_logits is not None:
        plan.on_logits(start, outputs.logits)
    return outputs


def part_of(arguments: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """The arguments for some columns of a prompt, whose KV holds those before them."""
    part = dict(arguments)
    if (mask := arguments.get("attention_mask")) is not None:
        part["attention_mask"] = mask[:, :end]
    if (positions := arguments.get("position_ids")) is not None:
        part["position_ids"] = positions[..., start:end]
    return part


def _keep_last(so_far: ReadSoFar, gives_logits: bool, hidden: torch.Tensor) -> torch.Tensor:
    """Keeps the last of what enters the output head; returns that of which it gives logits."""
    number = so_far.num_states
    earlier = [] if so_far.hidden is None else [so_far.hidden]
    # A copy, since a view would keep the whole prompt's.
    so_far.hidden = torch.cat([*earlier, hidden[:, -number:]], dim=1)[:, -number:]
    return hidden if gives_logits else hidden[:, -1:]

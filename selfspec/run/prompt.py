"""`Prompt`: what there is once a prompt was read; and what the model's own plain step gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad

from selfspec.compat.generation import kv_of

__all__ = ["Prompt", "next_positions", "plain_inputs"]


def plain_inputs(
    model: Any, input_ids: torch.Tensor, arguments: dict[str, Any], num_tokens: int = 1
) -> dict[str, Any]:
    """What the model's own `generate()` code gives a forward over the last tokens of the ids."""
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=num_tokens, **arguments
    )
    return inputs


def next_positions(
    model: Any,
    input_ids: torch.Tensor,  # (B, P)
    arguments: dict[str, Any],  # those of the step that reads the token after these
) -> torch.Tensor | str:
    """(..., B, 1): the position ids of the rows' next tokens, as the model's plain step gives them.

    A model may shift the positions in its arguments. Where it gives none, columns count. Returns
    the reason if the nodes of a tree can't be given the positions of plain steps.
    """
    # Any token stands for the next one, since positions do not depend on it.
    positions = plain_inputs(model, pad(input_ids, (0, 1)), arguments).get("position_ids")
    if positions is None:
        mask = arguments.get("attention_mask")
        if mask is not None and not mask.all():
            return "its plain steps are given no positions, and some columns are padding"
        positions = torch.full((1, 1), kv_of(arguments).get_seq_length(), device=input_ids.device)
    elif positions.is_floating_point():
        given, positions = positions, positions.long()
        if not (given == positions).all():
            return "the positions of its plain steps are no whole numbers"
    return positions.expand(*positions.shape[:-2], len(input_ids), 1)


@dataclass(frozen=True)
class Prompt:
    """A prompt that the model has read, and what stands ready for the first step."""

    input_ids: torch.Tensor  # (B, P)
    model_kwargs: dict[str, Any]  # those of the first step
    logits: torch.Tensor  # (B, V): those of the last token
    hidden: torch.Tensor | None  # (B, N, D): what entered the output head for the last tokens

    @property
    def cache(self) -> Any:
        """The KV of the prompt."""
        return kv_of(self.model_kwargs)

    def next_positions(self, model: Any) -> torch.Tensor:
        """(..., B, 1): the position id of each row's next token; only to be asked for trees."""
        positions = next_positions(model, self.input_ids, self.model_kwargs)
        assert not isinstance(positions, str), positions  # Then `Call` asks for chains.
        return positions

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """(B, P): which columns count; None where all do."""
        mask = self.model_kwargs.get("attention_mask")
        # Older versions of transformers keep a mask that hides nothing.
        return None if mask is None or mask.all() else mask[:, :-1].bool()

    @cached_property
    def texts(self) -> list[list[int]]:
        """Each row's tokens, without padding."""
        if self.visible is None or not self.input_ids.shape[1]:
            return self.input_ids.tolist()
        pairs = zip(self.input_ids, self.visible, strict=True)
        return [ids[seen[-len(ids) :]].tolist() for ids, seen in pairs]

"""`Prompt`: what there is once a prompt was read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from selfspec.compat.generation import kv_of

__all__ = ["Prompt"]


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

    @property
    def next_positions(self) -> torch.Tensor:
        """(..., B, 1): the position id of each row's next token."""
        positions: torch.Tensor = self.model_kwargs["position_ids"][..., -1:]
        return positions.expand(*positions.shape[:-2], len(self.input_ids), 1)

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

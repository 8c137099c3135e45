"""The two ways to run a model over drafts: trees over arenas, chains over the stock cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec.compat.generation import (
    KV,
    crop_to,
    record_past,
    stop_recording_past,
    update_arguments,
)
from selfspec.machine.device import upload
from selfspec.records import DraftTree
from selfspec.run.columns import Columns
from selfspec.run.grouped_attention import grouped_attention
from selfspec.run.layout import Layout, RowState, lay_out
from selfspec.run.model import AttentionTypes, device_of, takes
from selfspec.run.tree_kv import TreeKV

__all__ = ["ChainBackend", "OverColumns", "TreeBackend", "logits_of"]


def logits_of(model: Any, layout: Layout, cache: Any) -> torch.Tensor:
    """The logits (B, Q, V) of one forward of the model over trees."""
    masks = layout.masks
    with grouped_attention():
        output = model(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            **{KV: cache},
            return_dict=True,
        )
    return output.logits  # type: ignore[no-any-return]


class OverColumns:
    """What is the same for all backends that append trees to columns."""

    kv: Columns

    @property
    def front(self) -> int:
        """How many columns are in front of the next tree."""
        return self.kv.front

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path and forgets the rest."""
        self.kv.commit(paths)

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back."""
        self.kv.release(fills=fills)


class TreeBackend(OverColumns):
    """Trees of several rows in one forward, through 4-D masks."""

    reason = None
    setting_up = 0.0

    def __init__(
        self,
        model: Any,
        cache: Any,
        attention: AttentionTypes,
        next_positions: torch.Tensor,  # (..., B, 1): the position id of each row's next token
        visible: torch.Tensor | None,  # (B, P) bool
        *,
        room: int = 0,
        reach: int | None = None,
        kind: str = "eager",
        kv: Columns | None = None,  # Columns of another kind than those of a batch that stays.
    ) -> None:
        self.kind = kind
        self._model = model
        self._device = device_of(model)
        self._cache = cache
        self._attention = attention
        self._positions = next_positions[..., 0].cpu().numpy()  # (..., B)
        self._visible = visible
        self.kv = kv or TreeKV(
            cache,
            attention.by_layer,
            attention.window_sizes,
            num_rows=next_positions.shape[-2],
            room=room,
            reach=reach,
        )

    def max_width(self, max_nodes: int) -> int:
        """How wide the next forward may be, so that no tree crosses a change of scale."""
        period = self._attention.scale_period
        if not period:
            return max_nodes
        return min(max_nodes, period - (self.kv.front + 1) % period)

    def lay_out(self, trees: Sequence[DraftTree]) -> Layout:
        """Ids, positions and masks of the next forward; makes room for it in the KV."""
        self.kv.reserve(max(len(tree.tokens) for tree in trees))
        return lay_out(
            trees,
            RowState(self.kv.lengths, self._positions, self.kv.num_committed, self._visible),
            front=self.kv.front,
            windows=self._attention.windows,
            first_columns=self.kv.first_columns,
            dtype=self.kv.dtype,
            device=self._device,
        )

    def forward(self, layout: Layout) -> torch.Tensor:
        """The logits (B, Q, V) of the forward."""
        return logits_of(self._model, layout, self._cache)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these."""
        index = list(rows)
        self.kv.keep_rows(index)
        self._positions = self._positions[..., index]
        if self._visible is not None:
            self._visible = self._visible[index]


class ChainBackend:
    """Chains on the stock cache, for models whose forward can't take a tree.

    All rows advance by the same number of tokens. The model's own `generate` code prepares the
    inputs, so they are what its plain steps would get.
    """

    reason = None
    setting_up = 0.0

    def __init__(
        self,
        model: Any,
        cache: Any,
        input_ids: torch.Tensor,  # (B, L): the tokens read so far, without the roots
        model_kwargs: dict[str, Any],  # the arguments of the step that reads the roots
        *,
        kind: str = "eager",
    ) -> None:
        self.kind = kind
        self._model = model
        self._cache = cache
        self._ids = input_ids
        self._kwargs = {**model_kwargs, "logits_to_keep": 0}
        if not takes(model, "logits_to_keep"):
            del self._kwargs["logits_to_keep"]
        self._width = 0  # How many columns of the last chains are behind the committed ones.
        self.front = int(cache.get_seq_length())  # The committed columns.
        record_past(cache)

    def max_width(self, max_nodes: int) -> int:
        """All nodes asked for: a chain's tokens are where they will be in the text."""
        return max_nodes

    def lay_out(self, trees: Sequence[DraftTree]) -> dict[str, Any]:
        """The model's own inputs for the chains; shorter ones are padded with their last token."""
        chains_ids = [tree.tokens for tree in trees]
        self._width = max(map(len, chains_ids))
        padded = [ids + ids[-1:] * (self._width - len(ids)) for ids in chains_ids]
        chains = upload(torch.tensor(padded, device="cpu"), self._ids.device)
        self._ids = torch.cat([self._ids, chains], dim=-1)
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=self._width,
            **self._advanced(self._width - 1),
        )
        return inputs

    def forward(self, layout: dict[str, Any]) -> torch.Tensor:
        """The logits (B, Q, V) of the forward."""
        with grouped_attention():
            output = self._model(**layout, return_dict=True)
        return output.logits  # type: ignore[no-any-return]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the same number of tokens of every row and crops the rest off."""
        num_kept = len(paths[0])
        self.front, self._width = self.front + num_kept, self._width - num_kept
        crop_to(self._cache, self.front, self._width)
        self._ids = self._ids[:, : self._ids.shape[1] - self._width]
        self._kwargs = self._advanced(num_kept)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Is never called: rows that advance together also stop together."""
        raise AssertionError("chains drop no rows")

    def release(self, *, fills: bool = True) -> None:
        """Crops chains that an error has left, and lets windowed layers drop old columns again."""
        crop_to(self._cache, self.front, self._width)
        stop_recording_past(self._cache)

    def _advanced(self, num_tokens: int) -> dict[str, Any]:
        """The model's arguments, with masks and positions for `num_tokens` more tokens."""
        return update_arguments(self._model, dict(self._kwargs), num_new_tokens=num_tokens)

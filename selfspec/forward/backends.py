"""What runs a model over drafts: the interface, and trees over slots of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import KV
from selfspec.errors import UnsupportedError
from selfspec.forward.eager import EagerForwards, Forwards, Logits
from selfspec.forward.layout import InputShape, RowState, write
from selfspec.forward.model import AttentionTypes, Forwarded, device_of, forwarded
from selfspec.forward.prompt import Prefilled
from selfspec.forward.tree_kv import ENDLESS, TreeKV, bytes_per_token
from selfspec.records import DraftTree

__all__ = ["Backend", "TreeBackend", "tokens_in"]


class Backend(Protocol):
    """Runs the model over drafts of some rows, and keeps the KV of the accepted paths."""

    chains_only: bool  # Does it take no trees?

    @property
    def shows_states(self) -> bool:
        """Can its forwards give hidden states?"""
        ...

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        ...

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        ...

    @property
    def setting_up(self) -> float:
        """Seconds of the last `lay_out` that went into what later forwards will use too."""
        ...

    @property
    def front(self) -> int:
        """How many columns of the KV are in front of the next tree."""
        ...

    @property
    def num_pending(self) -> int | None:
        """How many committed tokens the next forward reads again; None if none ever has to be."""
        ...

    def admit(self, prompt: Prefilled, *, max_new_columns: int, max_tree: int) -> None:
        """Takes in the rows of a prompt that was read.

        `max_new_columns` is how far after the prompt the last token may be, drafted or not, and
        `max_tree` the most queries of a row in one forward.
        """
        ...

    def max_width(self, max_nodes: int) -> int:
        """How many of `max_nodes` nodes the next forward may have."""
        ...

    def lay_out(self, trees: Sequence[DraftTree]) -> Any:
        """The arguments of one forward."""
        ...

    def forward(self, layout: Any, *, with_states: bool = False) -> Forwarded:
        """The logits of every node, and its hidden state if that is asked for and can be had."""
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path, which starts at the root, and forgets the rest."""
        ...

    def wipe(self, rows: Sequence[int]) -> None:
        """Removes what drafts have left after the committed columns of some rows."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front in this order."""
        ...

    def only(self, rows: slice) -> AbstractContextManager[None]:
        """Inside, forwards have these rows alone, and the others stay as they are."""
        ...

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back; `fills` says whether anybody gets the cache."""
        ...


class TreeBackend:
    """Trees of several rows in one forward, through 4-D masks.

    Has no rows at first. `forwards` runs what is laid out here, eagerly or as captured graphs, and
    has the slots. The KV of an accepted path is moved right after the walk, so that the KV is
    complete between any two steps, and costs nothing if the path already lies in the right slots.

    If rows come and go, all have the same number of columns. When a row leaves, the last one moves
    into its place, so that the rows lie side by side, as a forward needs them.
    """

    num_pending = None
    chains_only = False

    def __init__(
        self,
        model: Any,
        attention: AttentionTypes,
        forwards: Forwards | None = None,  # None: eager ones.
        *,
        strict: bool = False,
    ) -> None:
        self._model = model
        self._attention = attention
        self._forwards: Forwards = EagerForwards(attention) if forwards is None else forwards
        self._strict = strict
        self.kv.clear()

    @property
    def kv(self) -> TreeKV:
        """The keys and values of the rows."""
        return self._forwards.kv

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        return self._forwards.kind

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        return self._forwards.reason

    @property
    def setting_up(self) -> float:
        """Seconds of the last `lay_out` that went into a capture."""
        return self._forwards.setting_up

    @property
    def front(self) -> int:
        """How many columns are in front of the next tree."""
        return self.kv.front

    def admit(self, prompt: Prefilled, *, max_new_columns: int, max_tree: int) -> None:
        """Takes in the rows of a prompt that was read. Only those that come first may be padded."""
        length, num_columns = prompt.input_ids.shape[1], int(prompt.cache.get_seq_length())
        if self.kv.comes_and_goes:
            columns_now = max(self.front, num_columns)
        else:  # All that may come, or as much as the prompt has.
            columns_now = min(max_new_columns, max(length, self._forwards.least_room)) + max_tree
        visible = None if prompt.visible is None else prompt.visible.to(device_of(self._model))
        sizes: Any = {
            "max_columns": num_columns + max_new_columns + max_tree,
            "columns_now": columns_now,
            "max_tree": max_tree,
        }
        try:
            self.add(prompt.cache, prompt.next_positions(self._model), visible, **sizes)
        except torch.OutOfMemoryError:
            if isinstance(self._forwards, EagerForwards):
                raise
            reason = "there is no memory for fixed KV slots next to the prompt's"
            self._forwards = EagerForwards(self._attention, reason=self._checked(reason))
            self.admit(prompt, max_new_columns=max_new_columns, max_tree=max_tree)

    def add(
        self,
        cache: Any,
        next_positions: torch.Tensor,  # (..., B, 1): the position id of each row's next token
        visible: torch.Tensor | None = None,  # (B, P) bool; None if all columns count
        *,
        max_columns: int = ENDLESS,
        columns_now: int,
        max_tree: int = 1,
    ) -> None:
        """Takes in the KV of a prompt; `TreeKV.add` says what the numbers are."""
        positions = next_positions[..., 0].cpu().numpy()
        num_rows = positions.shape[-1]
        # As transformers counts it: a row that is all padding begins after the prompt.
        starts = [0] * num_rows if visible is None else (visible.cumsum(-1) == 0).sum(-1).tolist()
        self._forwards.show(visible, num_rows, int(cache.get_seq_length()))
        max_tree = self._forwards.fitting(InputShape(num_rows, max_tree, (), 0)).width
        # If this breaks off, the cache is whole, and nothing else has changed.
        self.kv.add(
            cache,
            num_rows,
            max_columns=max_columns,
            columns_now=max(columns_now, max_tree),
            max_tree=max_tree,
        )
        for number, row in enumerate(self.kv.rows[-num_rows:]):
            row.start, row.position = starts[number], positions[..., number]

    def max_width(self, max_nodes: int) -> int:
        """How wide the next forward may be, so that no tree crosses a change of scale."""
        period = self._attention.scale_period
        if not period:
            return max_nodes
        return min(max_nodes, period - (self.kv.front + 1) % period)

    def lay_out(self, trees: Sequence[DraftTree]) -> Logits:
        """The next forward, whose inputs are on the device; makes room for it in the KV."""
        kv, windows = self.kv, self._attention.windows
        num_rows, width = len(trees), max(len(tree.tokens) for tree in trees)
        asked = InputShape(num_rows, width, kv.rows[0].position.shape, len(windows))
        shape = self._forwards.fitting(asked)
        kv.reserve(shape.width)
        state = RowState(
            kv.lengths,
            np.stack([row.position for row in kv.rows], axis=-1),
            [row.start for row in kv.rows],
            [kv.first_columns[name] for name in windows],
            kv.front,
        )
        run = self._forwards.ready(self._model, shape, write(trees, state, shape), state)
        return run if shape == asked else lambda: run()[:num_rows, :width]

    @property
    def shows_states(self) -> bool:
        """A replay runs no hook."""
        return isinstance(self._forwards, EagerForwards)

    def forward(self, layout: Logits, *, with_states: bool = False) -> Forwarded:
        """The logits, which the next captured forward overwrites, and the hidden states."""
        with_states = with_states and self.shows_states
        found = forwarded(self._model, layout, with_states=with_states)
        self._checked(self.reason)
        return found

    def _checked(self, reason: str | None) -> str | None:
        """Why forwards are not run as asked; an error if the config insists on it."""
        if self._strict and reason is not None:
            raise UnsupportedError(f"strict=True and forwards can't be as asked: {reason}")
        return reason

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path and forgets the rest."""
        self.kv.commit(paths)

    def wipe(self, rows: Sequence[int]) -> None:
        """Removes what drafts have left after the committed columns of some rows."""
        self.kv.wipe(rows)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front in this order."""
        self.kv.keep_rows(rows)
        self._forwards.keep_rows(rows)

    def only(self, rows: slice) -> AbstractContextManager[None]:
        """Inside, forwards have these rows alone. Rows that come and go are never padded."""
        return self.kv.only(rows)

    def release(self, *, fills: bool = True) -> None:
        """Gives the stock cache its contents back; `fills` says whether anybody gets it."""
        self.kv.release(fills=fills)


def tokens_in(model: Any, max_rows: int, max_bytes: int) -> int:
    """How many tokens of KV fit into `max_bytes` where `max_rows` rows come and go.

    A prompt that is being read has one share of `max_rows + 1`, and room is left for the copy of a
    part that is made when rows get more columns. Reads a token, whose KV shows what is exact.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{KV: cache})
    whole, part = bytes_per_token(cache)
    return max_rows * (max_bytes // (whole * (max_rows + 1) + part * max_rows))

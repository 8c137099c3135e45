"""The two ways to run a model over drafts: trees over slots, chains over the stock cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from selfspec.compat.generation import belongs_to_caller, update_arguments
from selfspec.compat.states import columns_of, crop_to, record_past, stop_recording_past
from selfspec.errors import UnsupportedError
from selfspec.machine.device import upload
from selfspec.records import DraftTree
from selfspec.run.graphs.runner import StaticRunner, stepped
from selfspec.run.grouped_attention import grouped_attention
from selfspec.run.kept_states import KeptStates
from selfspec.run.layout import InputShape, RowState, hiding, read, write
from selfspec.run.model import AttentionTypes, device_of, logits_of, takes
from selfspec.run.prompt import plain_inputs
from selfspec.run.tree_kv import ENDLESS, TreeKV

__all__ = ["ChainBackend", "TreeBackend"]

Logits = Callable[[], torch.Tensor]  # Runs a forward and gives its logits (B, Q, V).


class TreeBackend:
    """Trees of several rows in one forward, through 4-D masks.

    Has no rows at first. With a `runner`, forwards have one of a few shapes and are captured; the
    KV of an accepted path is moved right after the walk all the same, and not in the next replay.
    So the move runs while the CPU drafts, costs nothing if the path already lies in the right
    slots, and leaves the KV complete between any two steps.
    """

    num_pending = None

    def __init__(
        self,
        model: Any,
        attention: AttentionTypes,
        *,
        kv: TreeKV | None = None,
        runner: StaticRunner | None = None,
        kind: str = "eager",
        strict: bool = False,
    ) -> None:
        self._runner = runner
        self.kv = runner.kv if runner is not None else kv or TreeKV(attention)
        self.kv.clear()
        self._model = model
        self._attention = attention
        self._device = device_of(model)
        self._kind = kind
        self._strict = strict
        self._positions = np.zeros(0, np.int64)  # (..., B): those of the next roots
        self._starts: list[int] = []  # The first column of each row that counts.
        self._visible: torch.Tensor | None = None  # (B, P + 1): which columns count.

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        return self._kind if self._runner is None else self._runner.kind

    @kind.setter
    def kind(self, kind: str) -> None:
        self._kind = kind

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        return None if self._runner is None else self._runner.reason

    @property
    def setting_up(self) -> float:
        """Seconds of the last `lay_out` that went into a capture."""
        return 0.0 if self._runner is None else self._runner.setting_up

    @property
    def front(self) -> int:
        """How many columns are in front of the next tree."""
        return self.kv.front

    def add(
        self,
        cache: Any,
        next_positions: torch.Tensor,  # (..., B, 1): the position id of each row's next token
        visible: torch.Tensor | None = None,  # (B, P) bool; None if all columns count
        *,
        need: int = ENDLESS,
        room: int,
        widest: int = 1,
    ) -> None:
        """Takes in a prompt that was read; `TreeKV.add` says what the numbers are.

        Only a prompt that comes first can have columns that don't count.
        """
        positions = next_positions[..., 0].cpu().numpy()
        num_rows = positions.shape[-1]
        # As transformers counts it: a row that is all padding begins after the prompt.
        starts = [0] * num_rows if visible is None else (visible.cumsum(-1) == 0).sum(-1).tolist()
        if self._runner is not None:
            self._runner.show(visible, num_rows, int(cache.get_seq_length()))
            widest = stepped(widest)
        # If this breaks off, the cache is whole, and nothing else has changed.
        self.kv.add(cache, num_rows, need=need, room=max(room, widest), widest=widest)
        if visible is not None and self._runner is None:
            # One column more stands for all columns behind the prompt, which always count.
            self._visible = pad(visible, (0, 1), value=True)
        if self._starts:
            positions = np.concatenate([self._positions, positions], axis=-1)
        self._positions = positions
        self._starts += starts

    def max_width(self, max_nodes: int) -> int:
        """How wide the next forward may be, so that no tree crosses a change of scale."""
        period = self._attention.scale_period
        if not period:
            return max_nodes
        return min(max_nodes, period - (self.kv.front + 1) % period)

    def lay_out(self, trees: Sequence[DraftTree]) -> Logits:
        """The next forward, whose inputs are on the device; makes room for it in the KV."""
        kv, runner, windows = self.kv, self._runner, self._attention.windows
        rows, width = len(trees), max(len(tree.tokens) for tree in trees)
        shape = InputShape(rows, width, self._positions.shape[:-1], len(windows))
        if runner is not None:
            rows = min(stepped(rows), runner.num_rows)
            shape = shape._replace(rows=rows, width=stepped(width))
        kv.reserve(shape.width)
        state = RowState(
            kv.lengths,
            self._positions,
            self._starts,
            [kv.first_columns[name] for name in windows],
            kv.front,
        )
        inputs = write(trees, state, shape)
        if runner is not None:
            run, num_rows = runner.ready(self._model, shape, inputs), len(trees)
            return lambda: run()[:num_rows, :width]
        layout = read(
            upload(inputs, self._device),
            shape,
            windows=hiding(windows, state, width, has_padding=self._visible is not None),
            num_keys={name: kv.front - kv.first_columns[name] + width for name in windows},
            visible=self._visible,
            dtype=kv.dtype,
        )
        return partial(logits_of, self._model, layout, kv.cache)

    def forward(self, layout: Logits) -> torch.Tensor:
        """The logits (B, Q, V), which the next captured forward overwrites."""
        logits = layout()
        if self._strict and self.reason is not None:
            raise UnsupportedError(f"strict=True and forwards can't be as asked: {self.reason}")
        return logits

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path and forgets the rest."""
        self.kv.commit(paths)
        self._positions = self._positions + np.array([len(path) for path in paths], np.int64)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front in this order."""
        index = list(rows)
        self.kv.keep_rows(index)
        if self._runner is not None:
            self._runner.keep_rows(index)
        self._positions = self._positions[..., index]
        self._starts = [self._starts[row] for row in index]
        if self._visible is not None:
            self._visible = self._visible[index]

    def release(self, *, fills: bool = True) -> None:
        """Gives the stock cache its contents back; `fills` says whether anybody gets it."""
        self.kv.release(fills=fills)


class ChainBackend:
    """Chains on the stock cache, for models whose forward can't take a tree.

    All rows advance by the same number of tokens. The model's own `generate` code prepares the
    inputs, so they are what its plain steps would get.

    Wrong drafts are cropped. Running states can't be, so they are copied before a forward over
    drafts. If one of these was wrong, the cache goes back to the copies, and the tokens that were
    accepted are pending: the next forward reads them again, in front of its own.
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
        self._kwargs = model_kwargs
        self._takes_number = takes(model, "logits_to_keep")
        self._num_given = input_ids.shape[1]
        self._num_new = 0  # The tokens that were committed since.
        self._first_front = columns_of(cache) or self._num_given
        self._width = 0  # The columns of the last chains that are behind the committed ones.
        self._states = None if cache.is_croppable else KeptStates(cache)
        self._num_pending = 0
        # An interrupt may break off any forward over a cache that somebody else has.
        self._keeps_always = belongs_to_caller(cache)
        record_past(cache)

    @property
    def front(self) -> int:
        """The committed columns, pending ones among them."""
        return self._first_front + self._num_new

    @property
    def num_pending(self) -> int | None:
        """How many committed tokens the next forward reads again; None if none ever has to be."""
        return None if self._states is None else self._num_pending

    def max_width(self, max_nodes: int) -> int:
        """All nodes asked for, less what is read again: a token is where it will be in the text."""
        return max(max_nodes - self._num_pending, 1)

    def lay_out(self, trees: Sequence[DraftTree]) -> dict[str, Any]:
        """The model's own inputs for the chains; shorter ones are padded with their last token."""
        chains_ids = [tree.tokens for tree in trees]
        self._width = max(map(len, chains_ids))
        padded = [ids + ids[-1:] * (self._width - len(ids)) for ids in chains_ids]
        chains = upload(torch.tensor(padded, device="cpu"), self._ids.device)
        self._ids = torch.cat([self._ids, chains], dim=-1)
        if self._states is not None and (self._width > 1 or self._keeps_always):
            self._states.keep()
        return self._inputs(self._num_pending + self._width)

    def forward(self, layout: dict[str, Any]) -> torch.Tensor:
        """The logits (B, Q, V) of the forward."""
        if self._takes_number:
            layout["logits_to_keep"] = self._width
        with grouped_attention():
            output = self._model(**layout, return_dict=True)
        return output.logits[:, -self._width :]  # type: ignore[no-any-return]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the same number of tokens of every row and takes the rest back."""
        num_kept = len(paths[0])
        self._num_new, self._width = self._num_new + num_kept, self._width - num_kept
        if self._states is not None:
            self._num_pending = self._num_pending + num_kept if self._width else 0
        self._take_back()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Is never called: rows that advance together also stop together."""
        raise AssertionError("chains drop no rows")

    def release(self, *, fills: bool = True) -> None:
        """Takes back what an error has left, and lets windowed layers drop old columns again.

        What is pending is read first if anybody gets the cache.
        """
        self._take_back()
        if fills and self._states is not None and self._num_pending:
            self._states.keep()
            self._width = 1  # If this breaks off, it is taken back.
            try:
                self.forward(self._inputs(self._num_pending))
                self._num_pending = self._width = 0
            finally:
                self._take_back()
        stop_recording_past(self._cache)

    def _take_back(self) -> None:
        """Lets the cache hold what is committed and not pending, and the ids all committed ones."""
        self._ids = self._ids[:, : self._num_given + self._num_new]
        if self._states is not None:
            self._states.go_back() if self._width else self._states.forget()
        crop_to(self._cache, self.front - self._num_pending, self._width)

    def _inputs(self, num_tokens: int) -> dict[str, Any]:
        """The model's own inputs for the last tokens of the ids, with masks and positions."""
        # The arguments are those of a step that reads the first root.
        num_more = self._ids.shape[1] - self._num_given - 1
        arguments = update_arguments(self._model, dict(self._kwargs), num_new_tokens=num_more)
        return plain_inputs(self._model, self._ids, arguments, num_tokens)

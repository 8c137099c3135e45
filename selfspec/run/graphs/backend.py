"""Trees in forwards of fixed shape, over KV slots with fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from selfspec.errors import UnsupportedError
from selfspec.records import DraftTree
from selfspec.run.backends import OverColumns
from selfspec.run.graphs.runner import ForwardKey, StaticRunner
from selfspec.run.graphs.static_kv import StaticKV
from selfspec.run.graphs.step_inputs import InputShape, StepState
from selfspec.run.model import AttentionTypes

__all__ = ["GraphBackend"]


# From here on every multiple of this width is captured, below it every power of two.
_WIDE = 64


def stepped(width: int) -> int:
    """The width of the captured forward that has room for `width` >= 1 queries.

    >>> [stepped(width) for width in (1, 3, 9, 64, 65, 200)]
    [1, 4, 16, 64, 128, 256]
    """
    if width > _WIDE:
        return -(-width // _WIDE) * _WIDE
    return 1 << (width - 1).bit_length()


class GraphBackend(OverColumns):
    """Does what `TreeBackend` does, with the captured forwards of a `StaticRunner`.

    A step sends its inputs in one copy, replays one graph, and finds its logits in a buffer. The
    KV of an accepted path is moved right after the walk and not in the next replay. So the move
    runs while the CPU drafts, costs nothing if the path already lies in the right slots, and
    leaves the KV complete between any two steps.
    """

    kv: StaticKV

    def __init__(
        self,
        model: Any,
        runner: StaticRunner,
        cache: Any,
        attention: AttentionTypes,
        next_positions: torch.Tensor,  # (..., B, 1): the position id of each row's next token
        visible: torch.Tensor | None,  # (B, P) bool
        *,
        room: int,
        widest: int,
        reach: int | None = None,
        strict: bool = False,
    ) -> None:
        num_rows = next_positions.shape[-2]
        self._model = model
        self._runner = runner
        self._strict = strict
        self._types = tuple(attention.windows)
        self._positions = next_positions[..., 0].cpu().numpy()  # (..., B)
        self._starts = [0] * num_rows
        if visible is not None:
            self._starts = visible.int().argmax(-1).tolist()
        runner.show(visible, num_rows, int(cache.get_seq_length()))
        # This is last, since it empties the cache: an error before it leaves the cache whole.
        self.kv = StaticKV(
            cache,
            attention.by_layer,
            attention.window_sizes,
            runner.arenas,
            num_rows=num_rows,
            room=room,
            widest=stepped(widest),
            reach=reach,
        )

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        return self._runner.kind

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        return self._runner.reason

    @property
    def setting_up(self) -> float:
        """Seconds of the last `lay_out` that went into a capture."""
        return self._runner.setting_up

    def max_width(self, max_nodes: int) -> int:
        """All nodes that the caller asks for."""
        return max_nodes

    def lay_out(self, trees: Sequence[DraftTree]) -> tuple[ForwardKey, int, int]:
        """Writes and sends the inputs; returns their key, and how many rows and nodes count."""
        widest = max(len(tree.tokens) for tree in trees)
        width = stepped(widest)
        self.kv.reserve(width)
        num_rows = min(stepped(len(trees)), self._runner.num_rows)
        shape = InputShape(num_rows, width, self._positions.shape[:-1], len(self._types))
        key = ForwardKey(shape, tuple(self.kv.num_keys(width).items()), self.kv.dtype)
        firsts = [self.kv.first_columns[name] for name in self._types]
        positions = self._positions + np.array(self.kv.num_committed)
        state = StepState(self.kv.lengths, positions, self._starts, firsts, self.kv.front)
        self._runner.write(key, trees, state)
        self._runner.ready(self._model, key)
        return key, len(trees), widest

    def forward(self, layout: tuple[ForwardKey, int, int]) -> torch.Tensor:
        """The logits (B, Q, V), which the next forward overwrites."""
        key, num_rows, widest = layout
        logits = self._runner.run(key)
        if self._strict and self.reason is not None:
            raise UnsupportedError(f"strict=True and forwards can't be as asked: {self.reason}")
        return logits[:num_rows, :widest]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these."""
        index = list(rows)
        self.kv.keep_rows(index)
        self._runner.keep_rows(index)
        self._positions = self._positions[..., index]
        self._starts = [self._starts[row] for row in index]

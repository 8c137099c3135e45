"""Trees in forwards of fixed shape, on KV slots that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from selfspec.cost import stepped
from selfspec.errors import UnsupportedError
from selfspec.records import DraftTree, Queries
from selfspec.run.attention_types import AttentionTypes
from selfspec.run.graphs.frames import FramePlaces, FrameShape
from selfspec.run.graphs.runner import ForwardKey, StaticRunner
from selfspec.run.graphs.static_kv import StaticKV

__all__ = ["GraphBackend"]


class GraphBackend:
    """What `TreeBackend` does, by the forwards of a `StaticRunner`.

    A step sends one frame, replays one graph, and leaves its logits in a buffer. The KV of an
    accepted path is not moved by the next replay but right behind the walk, so that it runs
    beside the CPU's drafting, costs nothing where the path is in place already, and leaves the
    KV whole between any two steps.
    """

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
        sizes = {name: window.size for name, window in attention.windows.items()}
        self._model = model
        self._runner = runner
        self._strict = strict
        self._types = tuple(attention.windows)
        self._positions = next_positions[..., 0].cpu().numpy()  # (..., B)
        self._starts = [0] * num_rows
        if visible is not None:
            self._starts = visible.int().argmax(-1).tolist()
        runner.show(visible, num_rows, int(cache.get_seq_length()))
        self.kv = StaticKV(  # last, since it empties the cache: what fails before leaves it whole
            cache,
            attention.by_layer,
            sizes,
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
        """Why they are not as asked."""
        return self._runner.reason

    @property
    def front(self) -> int:
        """Columns in front of the next tree."""
        return self.kv.front

    def max_width(self, max_nodes: int) -> int:
        """As many as are asked for."""
        return max_nodes

    def lay_out(self, trees: Sequence[DraftTree | Queries]) -> tuple[ForwardKey, int, int]:
        """Writes the next frame; returns its key, and the rows and columns of it that count."""
        widest = max(len(tree.tokens) for tree in trees)
        width = stepped(widest)
        self.kv.reserve(width)
        num_rows = min(stepped(len(trees)), self._runner.num_rows)
        shape = FrameShape(num_rows, width, self._positions.shape[:-1], len(self._types))
        key = ForwardKey(shape, tuple(self.kv.num_keys(width).items()), self.kv.dtype)
        firsts = [self.kv.first_columns[name] for name in self._types]
        positions = self._positions + np.array(self.kv.num_moved)
        places = FramePlaces(self.kv.lengths, positions, self._starts, firsts, self.kv.front)
        self._runner.write(key, trees, places)
        self._runner.ready(self._model, key)  # A capture is no part of what a forward takes.
        return key, len(trees), widest

    def forward(self, layout: tuple[ForwardKey, int, int]) -> torch.Tensor:
        """Logits (B, Q, V), good until the next forward."""
        key, num_rows, widest = layout
        logits = self._runner.run(key)
        if self._strict and self.reason is not None:
            raise UnsupportedError(f"strict=True and forwards can't be as asked: {self.reason}")
        return logits[:num_rows, :widest]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps each row's path."""
        self.kv.commit(paths)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops the rows that stopped."""
        index = list(rows)
        self.kv.keep_rows(index)
        self._runner.keep_rows(index)
        self._positions = self._positions[..., index]
        self._starts = [self._starts[row] for row in index]

    def release(self) -> None:
        """Hands the cache back as stock left it."""
        self.kv.release()

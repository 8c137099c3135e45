"""Forwards over slots of keys and values: what a backend asks of them, and how they run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from selfspec.forward.layout import InputShape, RowState, hiding, read
from selfspec.forward.model import AttentionTypes, logits_of
from selfspec.forward.tree_kv import TreeKV
from selfspec.machine.device import upload

__all__ = ["EagerForwards", "Forwards", "Logits", "eager"]

Logits = Callable[[], torch.Tensor]  # Runs a forward and gives its logits (B, Q, V).


class Forwards(Protocol):
    """Runs the forwards of some rows over their slots, eagerly or as captured graphs."""

    kv: TreeKV
    least_room: int  # This many slots follow a prompt at first, if its text may need them.
    # Why captured forwards can't be had; a failed capture is noted here.
    reason: str | None
    setting_up: float  # Seconds of the last `ready` that later forwards will save.

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        ...

    def fitting(self, shape: InputShape) -> InputShape:
        """The shape of the forward that has room for inputs of `shape`."""
        ...

    def show(self, visible: torch.Tensor | None, num_rows: int, num_columns: int) -> None:
        """Notes which of a prompt's `num_columns` columns (B, P) count; None if all do."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows except these, which move to the front."""
        ...

    def ready(self, model: Any, shape: InputShape, inputs: torch.Tensor, state: RowState) -> Logits:
        """Sends the inputs of the next forward to the device; returns what runs it."""
        ...


def eager() -> str:
    """How a model is run that nothing else is known of."""
    return "eager"


class EagerForwards:
    """Runs each forward by plain operations, in slots that belong to the call or the session.

    With `max_rows`, rows come and go. `max_tokens` bounds the slots of all rows together.
    """

    least_room = 256
    setting_up = 0.0

    def __init__(
        self,
        attention: AttentionTypes,
        *,
        kind: Callable[[], str] = eager,
        reason: str | None = None,
        max_rows: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.kv = TreeKV(attention, max_rows=max_rows, max_tokens=max_tokens)
        self.reason = reason
        self._kind = kind
        self._windows = attention.windows
        self._visible: torch.Tensor | None = None  # (B, P + 1): which columns count.

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        return self._kind()

    def fitting(self, shape: InputShape) -> InputShape:
        """The same shape: an eager forward may have any."""
        return shape

    def show(self, visible: torch.Tensor | None, num_rows: int, num_columns: int) -> None:
        """Notes which of a prompt's columns (B, P) count; None if all do."""
        # One more column represents all columns after the prompt, which always count.
        self._visible = None if visible is None else pad(visible, (0, 1), value=True)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows except these, which move to the front."""
        if self._visible is not None:
            self._visible = self._visible[list(rows)]

    def ready(self, model: Any, shape: InputShape, inputs: torch.Tensor, state: RowState) -> Logits:
        """Sends the inputs of the next forward to the device; returns what runs it."""
        kv, has_padding = self.kv, self._visible is not None
        end, firsts = kv.front + shape.width, kv.first_columns
        layout = read(
            upload(inputs, kv.device),
            shape,
            windows=hiding(self._windows, state, shape.width, has_padding=has_padding),
            num_keys={name: end - first for name, first in firsts.items()},
            visible=self._visible,
            dtype=kv.dtype,
        )
        return partial(logits_of, model, layout, kv.cache)

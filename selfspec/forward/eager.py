"""Forwards over slots of keys and values: what a backend asks of them, and how they run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from selfspec.forward.layout import InputShape, hiding, read
from selfspec.forward.model import AttentionTypes, logits_of
from selfspec.forward.sizes import Policy
from selfspec.forward.tree_kv import TreeKV
from selfspec.machine.device import upload

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logits = Callable[[], torch.Tensor]  # Runs a forward and gives its logits (B, Q, V).


class CaptureFailed(Exception):
    """A forward can't be captured; the message says why."""


class Forwards(Protocol):
    """Runs the forwards of some rows over their slots, eagerly or as captured graphs."""

    kv: TreeKV
    reason: str | None  # Why captured forwards can't be had.
    setting_up: float  # How many seconds of the last `ready` a capture took, which serves others.

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        ...

    def fitting(self, shape: InputShape) -> InputShape:
        """The shape of the forward that has room for inputs of `shape`."""
        ...

    def ready(self, model: PreTrainedModel, shape: InputShape, inputs: torch.Tensor) -> Logits:
        """Sends the inputs of the next forward, for which there are slots; returns what runs it.

        Raises `CaptureFailed`, or `torch.OutOfMemoryError`.
        """
        ...


def eager() -> str:
    """How a model is run that nothing else is known of."""
    return "eager"


class EagerForwards:
    """Runs each forward by plain operations."""

    setting_up = 0.0

    def __init__(
        self,
        attention: AttentionTypes,
        policy: Policy = Policy(),  # noqa: B008 has no state
        *,
        kv: TreeKV | None = None,  # Slots that are there already.
        kind: Callable[[], str] = eager,
        reason: str | None = None,
    ) -> None:
        self.kv = TreeKV(attention, policy) if kv is None else kv
        self.reason = reason
        self._kind = kind
        self._windows = attention.windows
        self._functions = attention.functions

    @property
    def kind(self) -> str:
        return self._kind()

    def fitting(self, shape: InputShape) -> InputShape:
        """The same shape: an eager forward may have any."""
        return shape

    def ready(self, model: PreTrainedModel, shape: InputShape, inputs: torch.Tensor) -> Logits:
        kv, visible, width = self.kv, self.kv.visible, shape.width
        dtype, device = kv.placement
        end = kv.forward.front + width
        layout = read(
            upload(inputs, device),
            shape,
            windows=hiding(self._windows, kv.forward, width, has_padding=visible is not None),
            num_keys={name: end - first for name, first in kv.forward.firsts.items()},
            visible=visible,
            dtype=dtype,
        )
        return partial(logits_of, model, layout, kv.cache, kv.states, self._functions)

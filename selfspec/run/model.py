"""What is asked of a model itself: where it computes, and the attention types of its layers."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from selfspec.compat.modules import execution_device
from selfspec.run.layout import Window

__all__ = ["AttentionTypes", "device_of", "num_readable", "takes"]


class AttentionTypes(NamedTuple):
    """The attention type of each layer, the window of each type, and where scales change.

    `scale_period` is 0 for all models but Llama 4. That one scales a query by the block of
    `scale_period` columns that it is in, and takes its column from the length of the KV.
    """

    by_layer: tuple[str, ...]
    windows: dict[str, Window]
    scale_period: int

    @property
    def window_sizes(self) -> dict[str, int]:
        """How many columns back each type sees; 0 if it sees all."""
        return {name: window.size for name, window in self.windows.items()}


def device_of(model: Any) -> torch.device:
    """The model's device; for one that accelerate offloads, the device that its hooks run it on.

    The first weights of such a model may have no values before its forward, and then `model.device`
    is ``meta``.
    """
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return execution_device(model) or device


def num_readable(model: Any) -> int:
    """How many token ids the model can read; its head may name fewer, or more."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(model.get_input_embeddings(), "num_embeddings", config.vocab_size))


def takes(model: Any, argument: str) -> bool:
    """Does the model's forward take an argument of this name?"""
    return argument in inspect.signature(model.forward).parameters

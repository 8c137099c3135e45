"""What is asked of a model itself: where it computes, and its switches for decoding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["decode_mode", "device_of"]


def decode_mode(model: Any) -> AbstractContextManager[None]:
    """Inside, the model has stock's switches for decoding; older transformers have none."""
    enter: Callable[[], AbstractContextManager[None]]
    enter = getattr(model, "_optimize_model_for_decode", nullcontext)
    return enter()


def device_of(model: Any) -> torch.device:
    """The model's device; for one that accelerate offloads, the device that its hooks run it on.

    The first weights of such a model may have no values before its forward, and then `model.device`
    is ``meta``.
    """
    device: torch.device = model.device
    if device.type != "meta":
        return device
    for module in model.modules():
        execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if execution_device is not None:
            return torch.device(execution_device)
    return device

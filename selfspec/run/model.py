"""What is asked of a model itself: where it computes."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["device_of"]


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

"""What differs between a CPU and a CUDA device: streams, pinned copies and captured graphs.

Knows tensors and callables; nothing of models, trees or KV.
"""

from __future__ import annotations

import torch

from selfspec.machine.device.base import CpuDevice, Device, Fetched, Replay, upload
from selfspec.machine.device.cuda import CudaDevice

__all__ = ["CpuDevice", "CudaDevice", "Device", "Fetched", "Replay", "device_for", "upload"]


def device_for(device: torch.device, *, overlap: bool) -> Device:
    """How to work on `device`; `overlap` lets work run beside the main stream where it can."""
    if device.type == "cuda":
        return CudaDevice(device, overlap=overlap)
    return CpuDevice("CPU" if device.type == "cpu" else f"{device.type} device")

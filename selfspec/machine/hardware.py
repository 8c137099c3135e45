"""The name of this processor or card, and in what it calculates."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

import torch

from selfspec.compat.kernels import calculates_in_half


def device_name(device: torch.device) -> str:
    """The name of the card or the processor; for other devices, their type and the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor() if device.type == "cpu" else f"{device.type}, {processor()}"


@cache
def calculates_in(dtype: torch.dtype) -> bool:
    """Does this CPU calculate in a precision? If not, it converts to float32 in every product."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    return name is None or calculates_in_half(name)


@cache
def processor() -> str:
    """The processor's name, and the instruction set that torch uses."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # Only Linux has this file.
        info = ""
    line = re.search(r"^model name\s*: (.+)", info, re.MULTILINE)
    name = line[1] if line else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"

"""The name of this processor or card. Measurements are kept under it and used on no other."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from selfspec.compat.kernels import calculates_in_half

# Fields of x86 and of ARM. A virtual processor often has only its maker as its model name.
_NUMBERS = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")


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
    """The processor's name and numbers, and the instruction set that torch uses."""
    info = Path("/proc/cpuinfo")
    try:
        found = processor_of(info.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # Only Linux has this file.
        found = ""
    name = found or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def processor_of(info: str) -> str:
    """The first processor in the text of /proc/cpuinfo; empty if that names none.

    >>> processor_of("model name : AMD EPYC\\ncpu family : 25\\nmodel : 1\\n\\nmodel name : other")
    'AMD EPYC (cpu family 25, model 1)'
    """
    fields: dict[str, str] = {}
    for line in info.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = ", ".join(f"{name} {fields[name]}" for name in _NUMBERS if fields.get(name))
    name = fields.get("model name", "")
    return f"{name} ({numbers})".strip() if numbers else name

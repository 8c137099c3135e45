"""Which processor or card this is: what was measured on one of them holds on no other."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

__all__ = ["device_name", "processor", "processor_of"]

# as x86 and ARM have it; the name of a virtual one often says no more than who made it
_TELLING = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")


def device_name(device: torch.device) -> str:
    """Of the card, or of the processor; with what else the device is, where it is neither."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor() if device.type == "cpu" else f"{device.type}, {processor()}"


@cache
def processor() -> str:
    """Its name, what tells it from others of that name, and which instructions torch uses."""
    info = Path("/proc/cpuinfo")
    try:
        found = processor_of(info.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # no Linux
        found = ""
    name = found or platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def processor_of(info: str) -> str:
    """The first one of what Linux says of all; empty where it names none.

    >>> processor_of("model name : AMD EPYC\\ncpu family : 25\\nmodel : 1\\n\\nmodel name : other")
    'AMD EPYC (cpu family 25, model 1)'
    """
    fields: dict[str, str] = {}
    for line in info.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = ", ".join(f"{name} {fields[name]}" for name in _TELLING if fields.get(name))
    name = fields.get("model name", "")
    return f"{name} ({numbers})".strip() if numbers else name

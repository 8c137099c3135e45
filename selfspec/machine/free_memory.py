"""How much memory is free on a device."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

__all__ = ["free_memory"]

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device | None = None) -> int:
    """The bytes that are free on a GPU, or on this machine, or in our container if it has fewer."""
    if device is not None and device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept  # Torch's allocator keeps some.
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # No container, or one without a limit.
        return free
    return min(free, max(limit - used, 0))

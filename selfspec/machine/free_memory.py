"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["free_memory"]

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> float:
    """How many bytes are free on this machine, or in our container if that has fewer."""
    free = float(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        return min(free, float(limit) - float(used))
    except (OSError, ValueError):  # No container, or one without a limit.
        return free

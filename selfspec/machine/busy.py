"""How much of the processor other programs leave. Knows no model; brings torch along when asked."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter, process_time

__all__ = ["LEAST_SHARE", "num_processors", "processor_share"]

LEAST_SHARE = 0.8  # Times say little if we get less of the processor than that.
_LOOK = 0.05  # Seconds of a look.
_LOOK_AT_QUOTA = 0.3  # Of one at a process with a quota, which is counted for each 0.1 seconds.


def processor_share() -> float:
    """The part of what this process may use of the processor that it gets if it asks for all.

    Half means that others are as busy as we are.
    """
    import torch

    threads = torch.get_num_threads()
    processors = min(num_processors(), threads)
    look = _LOOK if processors == int(processors) == threads else _LOOK_AT_QUOTA
    matrix = torch.ones(512, 512, device="cpu")
    start, used = perf_counter(), process_time()
    while perf_counter() - start < look:
        torch.mm(matrix, matrix)
    took = perf_counter() - start
    return min((process_time() - used) / took / processors, 1.0)


def num_processors(root: Path = Path("/")) -> float:
    """How many processors this process may use at once, by its affinity and its quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Only Linux has it.
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(usable, *_quotas(root))


def _quotas(root: Path) -> list[float]:
    """The processors that each control group above this process may use; infinite without any."""
    found = [float("inf")]
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # Only Linux has this file.
        return found
    for _, controllers, path in (line.split(":", 2) for line in lines):
        is_second = not controllers  # The second version of control groups has one tree for all.
        if not is_second and "cpu" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / ("" if is_second else "cpu")
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            found += _quota(folder.joinpath(*parts[:depth]), is_second=is_second)
    return found


def _quota(folder: Path, *, is_second: bool) -> list[float]:
    names = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        text = " ".join((folder / name).read_text(encoding="utf-8") for name in names)
        quota, period = map(float, text.split())
    except (OSError, ValueError):  # It has none, or "max".
        return []
    return [quota / period] if quota > 0 and period > 0 else []

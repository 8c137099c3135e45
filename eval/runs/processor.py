"""How much of the processor other programs leave."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter, process_time

import torch

from selfspec.machine.memory import limits_of_groups

LEAST_SHARE = 0.8  # Below this share of the processor, times say little.
_LOOK = 0.05  # Seconds that one look takes.
_LOOK_AT_QUOTA = 0.3  # The same under a quota, which Linux counts in periods of 0.1 seconds.


def processor_share() -> float:
    """The share of its processors that this process gets if it asks for all of them.

    Half means that other programs are as busy as this one.
    """
    threads = torch.get_num_threads()
    processors = min(num_processors(), threads)
    look = _LOOK if processors == int(processors) == threads else _LOOK_AT_QUOTA
    matrix = torch.ones(512, 512, dtype=torch.float32, device="cpu")
    start, used = perf_counter(), process_time()
    while perf_counter() - start < look:
        torch.mm(matrix, matrix)
    took = perf_counter() - start
    return min((process_time() - used) / took / processors, 1.0)


def num_processors(root: Path = Path("/")) -> float:
    """How many processors this process may use at once, by its affinity and its quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Only Linux has it.
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = limits_of_groups("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"], root)
    # A quota of -1 is none.
    return min([usable, *(quota / period for quota, period, _ in quotas if quota > 0 < period)])

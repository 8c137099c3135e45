"""How much of the processor other programs leave. Knows no model; brings torch along when asked."""

from __future__ import annotations

from time import perf_counter, process_time

__all__ = ["LEAST_SHARE", "is_busy", "processor_share"]

LEAST_SHARE = 0.8  # Times say little if we get less of the processor than that.
_LOOK = 0.05  # Seconds of a look.


def processor_share() -> float:
    """The part of the processor that this process gets when it asks for all of torch's threads.

    Half means that others are as busy as we are.
    """
    import torch

    matrix = torch.ones(512, 512, device="cpu")
    start, used = perf_counter(), process_time()
    while perf_counter() - start < _LOOK:
        torch.mm(matrix, matrix)
    took = perf_counter() - start
    return (process_time() - used) / took / torch.get_num_threads()


def is_busy() -> bool:
    """Do other programs take so much of the processor that times say little?"""
    return processor_share() < LEAST_SHARE

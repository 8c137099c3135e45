"""How long a `generate()` call takes, the prompt's forward and the rest told apart.

Knows one model, a callable and what steps have cost; nothing of methods, questions or tables.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from selfspec.cost import CostCurve
from selfspec.forward.costs import Costs, nearest


class Timed(NamedTuple):
    """What a call returned, and its seconds.

    `prefill_seconds` go to the first token; what comes after it counts as decoding, what a drafter
    learns from the prompt included. They are 0 for a method that has told nobody of its tokens.
    """

    output: torch.Tensor
    seconds: float
    prefill_seconds: float


def learned_curve(costs: Costs, forward: str | None, num_columns: int) -> CostCurve | None:
    """What calls of one row have shown of steps after a text of about this length, if any did."""
    curves = costs.curves.get((1, forward or "eager"), {})
    known = {first: curve for first, curve in curves.items() if curve.knows_plain}
    return nearest(known, num_columns) if known else None


class FirstToken:
    """A streamer of `generate()` that knows when the first token after the prompt has come."""

    def __init__(self, device: torch.device) -> None:
        self.stamps: list[Any] = []  # When the prompt came, and the first token.
        self._device = device

    def put(self, _value: torch.Tensor) -> None:
        if len(self.stamps) < 2:
            self.stamps.append(_stamp(self._device))

    def end(self) -> None: ...


def timed(model: Any, run: Callable[[FirstToken], torch.Tensor]) -> Timed:
    """Runs a call of `model.generate()` with the device idle before and after it.

    `run` gets the streamer that the call is to have.
    """
    device, streamer = model.device, FirstToken(model.device)
    synchronise(device)
    start, begin = perf_counter(), _stamp(device)
    output = run(streamer)
    synchronise(device)
    seconds = perf_counter() - start
    has_first = len(streamer.stamps) == 2
    return Timed(output, seconds, _seconds_between(begin, streamer.stamps[1]) if has_first else 0.0)


def num_new_tokens(output: torch.Tensor, prompt_ids: torch.Tensor) -> int:
    """Of one answer (1, L): the new ids, an end token among them; the same for all methods."""
    return output.shape[1] - prompt_ids.shape[1]


def synchronise(device: torch.device) -> None:
    """Returns when the device has done all that was queued; on a CPU at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _stamp(device: torch.device) -> Any:
    """A moment. On CUDA an event, so that nobody waits for the queue to drain."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
    synchronise(device)
    return perf_counter()


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1000

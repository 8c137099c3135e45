"""How long a `generate()` call takes, the prompt's forward and the rest told apart.

Knows one model and a callable; nothing of methods, questions or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch


class Timed(NamedTuple):
    """What a call returned, and its seconds.

    `prefill_seconds` go to the end of the prompt's forward; what comes after it counts as
    decoding, what a drafter learns from the prompt included.
    """

    output: torch.Tensor
    seconds: float
    prefill_seconds: float


def timed(model: Any, run: Callable[[], torch.Tensor]) -> Timed:
    """Runs a call of `model.generate()` with the device idle before and after it."""
    device = model.device
    synchronise(device)
    start = perf_counter()
    with _reading_timed(model, device) as prefill_seconds:
        output = run()
        synchronise(device)
    return Timed(output, perf_counter() - start, prefill_seconds())


def num_new_tokens(output: torch.Tensor, prompt_ids: torch.Tensor) -> int:
    """Of one answer (1, L): the new ids, an end token among them; the same for all methods."""
    return output.shape[1] - prompt_ids.shape[1]


def synchronise(device: torch.device) -> None:
    """Returns when the device has done all that was queued; on a CPU at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def _reading_timed(model: Any, device: torch.device) -> Iterator[Callable[[], float]]:
    """Yields what tells the seconds from here until the model has read its prompt.

    After the prompt's forward, every loop updates the arguments of the next one with its outputs;
    assisted decoding has read the prompt with its first forward. A hook on the model in any other
    case would be seen by what captures forwards, and all of them would be run eagerly.
    """
    start, update = _stamp(device), model._update_model_kwargs_for_generation
    assist = model._get_candidate_generator
    ends: list[Any] = []
    is_assisted = False

    def updating(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if outputs and not is_assisted and not ends:
            ends.append(_stamp(device))
        return update(outputs, *args, **kwargs)

    def assisting(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_assisted
        is_assisted = True

        def fire(*_args: object) -> None:
            handle.remove()
            ends.append(_stamp(device))

        handle = model.register_forward_hook(fire)
        return assist(*args, **kwargs)

    model._update_model_kwargs_for_generation = updating
    model._get_candidate_generator = assisting
    try:
        yield lambda: _seconds_between(start, ends[0]) if ends else 0.0
    finally:
        del model._update_model_kwargs_for_generation, model._get_candidate_generator


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

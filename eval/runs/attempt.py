"""One call of one method: what came out, how long it took, and what was counted meanwhile.

Knows a model, a method and a prompt; neither questions nor rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from eval.errors import one_line
from eval.methods.method import Method, SelfSpecMethod, StaticMethod
from eval.runs.processor import processor_share
from eval.runs.timing import FirstToken, Timed, timed
from selfspec.records import StepRecord
from selfspec.stats import GenerationStats


class Outcome(NamedTuple):
    """The new ids, and numbers as a row has them, or an error."""

    new_ids: list[int]
    numbers: dict[str, Any]
    error: str | None = None


def attempt(model: Any, method: Method, prompt_ids: Sequence[int], **asked: Any) -> Outcome:
    """Lets a method answer; `asked` is what its `answer` takes by name.

    Whatever goes wrong in there is an outcome too: the others go on.
    """
    try:
        model = method.running(model)
        ids = torch.tensor([prompt_ids], device=model.device)
        share = processor_share() if model.device.type == "cpu" else None
        with _watched(method, model) as watch:
            result = timed(model, partial(_answer, method, model, ids, asked))
    except Exception as error:
        return Outcome([], {}, one_line(error))
    new_ids = result.output[0, len(prompt_ids) :].tolist()
    numbers = _numbers(result, len(prompt_ids), new_ids, watch)
    return Outcome(new_ids, {**numbers, "processor_share": share})


def _answer(
    method: Method, model: Any, ids: torch.Tensor, asked: dict[str, Any], streamer: FirstToken
) -> torch.Tensor:
    return method.answer(model, ids, streamer=streamer, **asked)


class _Watch:
    """What is counted while a method answers."""

    def __init__(self, stats: GenerationStats | None = None) -> None:
        self.num_forwards = 0
        self.widths: Counter[int] = Counter()
        self.stats = stats

    def count_forward(self, *_args: object) -> None:
        self.num_forwards += 1

    def count_step(self, record: StepRecord) -> None:
        self.widths[len(record.tree)] += 1


@contextmanager
def _watched(method: Method, model: Any) -> Iterator[_Watch]:
    """Counts the forwards of methods that don't say; the widths of those that do."""
    watch = _Watch()
    with ExitStack() as stack:
        if isinstance(method, SelfSpecMethod):
            stack.enter_context(method.spec.listening(watch.count_step))
        elif not isinstance(method, StaticMethod):  # a hook would stand in its compiler's way
            handle = model.register_forward_hook(watch.count_forward)
            stack.callback(handle.remove)
        yield watch
    watch.stats = method.stats


def _numbers(
    result: Timed, num_prompt_tokens: int, new_ids: list[int], watch: _Watch
) -> dict[str, Any]:
    digest = hashlib.sha256(repr(new_ids).encode()).hexdigest()
    values: dict[str, Any] = {
        "num_prompt_tokens": num_prompt_tokens,
        "num_new_tokens": len(new_ids),
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds or None,  # Not all methods tell it apart.
        "output_sha256": digest,
    }
    if watch.stats is None:
        # Forwards after the prompt's; where nobody counted, one for each token.
        return {**values, "num_steps": (watch.num_forwards or len(new_ids)) - 1}
    stats, widths = watch.stats, watch.widths
    widths[1] -= min(1, widths[1])  # The first record is the prompt's own.
    return {
        **values,
        "num_steps": stats.num_steps,
        "num_nodes": stats.num_nodes,
        "accepted_lengths": dict(stats.accepted_lengths),
        "widths": dict(+widths),
        "drafted_by_source": dict(stats.drafted_by_source),
        "accepted_by_source": dict(stats.accepted_by_source),
        "stage_seconds": {name: float(spent) for name, spent in stats.seconds.items()},
        "table_bytes": stats.table_bytes,
        "disabled_reason": stats.disabled_reason,
        "forward": stats.forward,
    }

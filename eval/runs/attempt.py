"""One call of one method: what came out, how long it took, and what was counted meanwhile.

Knows a model, a method and prompts; neither questions nor rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from eval.benches.dialogue import Padded, padded
from eval.errors import one_line
from eval.methods.method import Method, SelfSpecMethod, StaticMethod, end_ids, to_end
from eval.methods.timing import Timed, timed
from selfspec.records import StepRecord
from selfspec.stats import GenerationStats


class Outcome(NamedTuple):
    """The new ids of each row and the numbers by the names of `Numbers`, or an error."""

    new_ids: list[list[int]]
    numbers: dict[str, Any]
    error: str | None = None


def attempt(model: Any, method: Method, prompts: Padded, **asked: Any) -> Outcome:
    """Lets a method answer; `asked` is what its `answer` takes by name.

    Whatever goes wrong in there is an outcome too: the others go on.
    """
    try:
        model = method.running(model)
        with _watched(method, model) as watch:
            result = timed(
                model,
                lambda: method.answer(model, prompts.ids, attention_mask=prompts.mask, **asked),
            )
    except Exception as error:
        return Outcome([], {}, one_line(error))
    new_ids = new_ids_of(result.output, prompts, model)
    return Outcome(new_ids, _numbers(result, prompts, new_ids, watch))


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
    result: Timed, prompts: Padded, new_ids: list[list[int]], watch: _Watch
) -> dict[str, Any]:
    num_new = sum(map(len, new_ids))
    digest = hashlib.sha256(repr(new_ids).encode()).hexdigest()
    values: dict[str, Any] = {
        "num_prompt_tokens": int(prompts.mask.sum()),
        "num_new_tokens": num_new,
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds,
        "output_sha256": digest,
    }
    if watch.stats is None:
        return {**values, "num_steps": _num_steps(watch.num_forwards, new_ids)}
    stats, widths = watch.stats, watch.widths
    widths[1] -= min(len(new_ids), widths[1])  # each row's first record is the prompt's own
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
        "packed_bytes": stats.packed_bytes,
    }


def _num_steps(num_forwards: int, new_ids: list[list[int]]) -> int:
    """Forwards after the prompt's; in a batch, and where nobody counted, one for each token."""
    if num_forwards and len(new_ids) == 1:
        return num_forwards - 1
    return sum(len(ids) - 1 for ids in new_ids)


def padded_for(model: Any, prompts: Sequence[Sequence[int]]) -> Padded:
    """Prompts side by side, with the model's pads, on its device."""
    pad = model.generation_config.pad_token_id
    ids, mask = padded(prompts, 0 if pad is None else int(pad))
    return Padded(ids.to(model.device), mask.to(model.device))


def new_ids_of(output: Any, prompts: Padded, model: Any) -> list[list[int]]:
    """The ids after the prompts; in a batch, what pads a row after its end is none."""
    rows: list[list[int]] = output[:, prompts.ids.shape[1] :].tolist()
    ends = end_ids(model)
    return rows if len(rows) == 1 else [to_end(row, ends) for row in rows]

"""Ways to answer many prompts over one model, and when each answer was there.

Knows one model and lists of ids; nothing of questions or tables.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.methods.method import end_ids, to_end
from selfspec import SelfSpec, generate_many
from selfspec.batch import ArrivalOrder, Scheduler, ShortestFirst
from selfspec.weights.streamed.memory_plan import kv_bytes

# One prompt's number and its new tokens, as soon as they are known.
_Answers = Iterator[tuple[int, list[int]]]


@dataclass(frozen=True)
class Many:
    """What is asked: all prompts, over so many rows and so much memory, with these knobs.

    `max_tokens` is what all rows of a batch may hold together; None: no limit.
    """

    model: Any
    tokenizer: Any
    prompts: Sequence[list[int]]
    max_new_tokens: int
    max_rows: int
    max_tokens: int | None
    knobs: dict[str, Any]


class Answered(NamedTuple):
    """What one way took: its answers in order, when each was there, and what was counted."""

    texts: list[list[int]]
    ends: list[float]  # Seconds since the start.
    spec: SelfSpec | None


def answered(way: str, many: Many) -> Answered:
    """Answers all prompts one way, with nothing learned before."""
    spec = SelfSpec(**{**many.knobs, **({"max_nodes": 1} if way == _PLAIN else {})})
    texts: list[list[int]] = [[] for _ in many.prompts]
    ends = [0.0] * len(texts)
    start = perf_counter()
    for index, ids in WAYS[way](many, spec):
        texts[index], ends[index] = ids, perf_counter() - start
    return Answered(texts, ends, spec if spec.total_stats.num_calls else None)


def _in_batches(many: Many, spec: SelfSpec, *, drafts: bool) -> _Answers:
    """Prompts of similar lengths together, padded on the left; a batch waits for its longest."""
    extra = {"assistant": spec} if drafts else {}
    pad, ends = many.model.generation_config.pad_token_id or 0, end_ids(many.model)
    for batch in _batches(many):
        prompts = [list(many.prompts[index]) for index in batch]
        length = max(map(len, prompts))
        ids = [[pad] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = many.model.generate(
            input_ids=torch.tensor(ids, device=many.model.device),
            attention_mask=torch.tensor(mask, device=many.model.device),
            max_new_tokens=many.max_new_tokens,
            do_sample=False,
            **extra,
        )
        for index, row in zip(batch, output[:, length:].tolist(), strict=True):
            yield index, to_end(row, ends)  # What pads a row after its end is none of its text.


def _batches(many: Many) -> Iterator[list[int]]:
    """The sorted prompts, in the largest batches that fit."""
    batch: list[int] = []
    for index in sorted(range(len(many.prompts)), key=lambda index: len(many.prompts[index])):
        length = len(many.prompts[index]) + many.max_new_tokens
        full = many.max_tokens is not None and (len(batch) + 1) * length > many.max_tokens
        if batch and (full or len(batch) == many.max_rows):
            yield batch
            batch = []
        batch.append(index)
    yield batch


def _with_rows(many: Many, spec: SelfSpec, *, scheduler: type[Scheduler]) -> _Answers:
    """Rows that come and go."""
    for answer in generate_many(
        many.model,
        many.tokenizer,
        many.prompts,
        assistant=spec,
        max_rows=many.max_rows,
        max_memory=many.max_tokens and kv_bytes(many.model, many.max_tokens),
        scheduler=scheduler(),
        max_new_tokens=many.max_new_tokens,
        do_sample=False,
    ):
        if answer.error is not None:
            raise answer.error
        yield answer.index, answer.ids


def _paged(many: Many, _spec: SelfSpec) -> _Answers:
    """transformers' own rows that come and go; all its answers come at the end.

    Of the arguments of `generate()` it takes the most new tokens alone.
    """
    config = copy.deepcopy(many.model.generation_config)
    config.do_sample = False
    outputs = many.model.generate_batch(
        [list(ids) for ids in many.prompts],
        generation_config=config,
        max_new_tokens=many.max_new_tokens,
    )
    for name, output in outputs.items():
        yield int(name.removeprefix("req_")), list(output.generated_tokens)


_PLAIN = "rows alone"
WAYS: dict[str, Callable[[Many, SelfSpec], _Answers]] = {
    "stock": partial(_in_batches, drafts=False),
    "drafted": partial(_in_batches, drafts=True),
    "arrival": partial(_with_rows, scheduler=ArrivalOrder),
    "shortest": partial(_with_rows, scheduler=ShortestFirst),
    _PLAIN: partial(_with_rows, scheduler=ShortestFirst),
    "generate_batch": _paged,
}
DEFAULTS = ("stock", "drafted", _PLAIN, "arrival", "shortest")

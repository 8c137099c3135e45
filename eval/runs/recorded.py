"""A model's answers with all that it said on the way, so that steps can be replayed without it.

A text knows what the model said behind each of its tokens and behind every draft of a wide tree.
So a replay can learn from drafts as a call does. Where a draft was not in that tree, what the model
said behind the same two tokens stands in, or behind the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eval.benches.prompts import Prompts
from eval.errors import EvalError
from eval.methods.method import SelfSpecMethod
from selfspec import SelfSpec, StepRecord
from selfspec.draft.sources import Cursor, Source
from selfspec.records import TopK

Path_ = tuple[int, ...]
Row = tuple[list[int], list[float]]  # Ids and probabilities of the likeliest next tokens.
_TOP_K = 8
_NOTHING: Row = ([-1] * _TOP_K, [0.0] * _TOP_K)


@dataclass
class RecordedText:
    """What was asked, as ids, what the model said, and what else it would have said.

    `behind` has a row for each place: how many tokens of the answer stand before it, and the drafts
    behind these. `lessons` are the pairs of the prompt that tables learn from, and their rows.
    """

    task: str
    vocab_size: int
    seed: int | None  # Of the noise that it was drawn with; None if it is greedy.
    prompt_ids: list[int]
    output_ids: list[int]
    lessons: list[tuple[list[int], Row]] = field(default_factory=list)
    behind: dict[tuple[int, Path_], Row] = field(default_factory=dict)

    def row(self, num_before: int, drafts: Path_) -> Row:
        """What the model says behind some drafts, which stand behind part of the answer."""
        place = self._place(num_before, drafts)
        if place in self.behind:
            return self.behind[place]
        text = (*self._ids_before(num_before), *drafts)[-2:]
        return self._by_tokens.get(text) or self._by_tokens.get(text[-1:], _NOTHING)

    def add(self, num_before: int, drafts: Path_, row: Row) -> None:
        """Takes in what the model said at a place."""
        self.behind[self._place(num_before, drafts)] = row

    def _place(self, num_before: int, drafts: Path_) -> tuple[int, Path_]:
        """Drafts that the answer has, too, are part of it."""
        right = 0
        for draft, token in zip(drafts, self.output_ids[num_before:], strict=False):
            if draft != token:
                break
            right += 1
        return num_before + right, drafts[right:]

    def _ids_before(self, num_before: int) -> Path_:
        return tuple([*self.prompt_ids[-2:], *self.output_ids[:num_before]][-2:])

    @cached_property
    def _by_tokens(self) -> dict[Path_, Row]:
        rows: dict[Path_, Row] = {}
        for (num_before, drafts), row in self.behind.items():
            text = (*self._ids_before(num_before), *drafts)[-2:]
            rows[text] = rows[text[-1:]] = row
        return rows


def record(
    model: Any, prompts: Prompts, *, max_new_tokens: int, temperature: float, max_nodes: int
) -> Iterable[RecordedText]:
    """Answers all prompts, drafting wide trees, cold at the start."""
    heard = _Heard()
    spec = SelfSpec(budget="fixed", max_nodes=max_nodes, extra_sources=[heard], top_k=_TOP_K)
    method = SelfSpecMethod("selfspec", spec)
    asked = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    for seed, (question, input_ids) in enumerate(prompts):
        steps: list[StepRecord] = []
        heard.lessons = []
        with spec.listening(steps.append):
            ids = method.answer(model, input_ids.to(model.device), seed=seed, **asked)
        prompt_ids = input_ids[0].tolist()
        text = RecordedText(
            question.task,
            model.config.get_text_config().vocab_size,
            seed if temperature else None,
            prompt_ids,
            ids[0, len(prompt_ids) :].tolist(),
            heard.lessons,
        )
        _take(text, steps)
        yield text


def _take(text: RecordedText, steps: Sequence[StepRecord]) -> None:
    """Files what the model said at every node of some steps."""
    num_before = 0
    for step in steps:
        assert step.top is not None
        for drafts, row in zip(paths_of(step.tree), _rows(step.top), strict=True):
            text.add(num_before, drafts, row)
        num_before += len(step.committed_ids)


def paths_of(tree: Any) -> list[Path_]:
    """The drafts that lead to each node."""
    paths: list[Path_] = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def _rows(top: TopK) -> list[Row]:
    return list(zip(top.ids.tolist(), top.probabilities.tolist(), strict=True))


class _Heard(Source, Cursor):
    """A source that drafts nothing and keeps what tables learn from the prompt."""

    name = "heard"

    def __init__(self) -> None:
        self.lessons: list[tuple[list[int], Row]] = []

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> _Heard:
        return self

    copy = root = lambda self: self

    def expand(self, state: Any) -> list[Any]:
        return []

    def follow(self, state: Any, token: int) -> None:
        return None

    def observe(self, record: StepRecord) -> None:
        pass

    def observe_pairs(self, pairs: Any, top: TopK) -> None:
        self.lessons += zip(pairs.tolist(), _rows(top), strict=True)


def write_texts(path: Path, texts: Iterable[RecordedText]) -> int:
    """Writes a line of JSON for each text, as they come; returns how many."""
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            number += 1
            behind = [[*place, *row] for place, row in text.behind.items()]
            file.write(json.dumps({**vars(text), "behind": behind}) + "\n")
            file.flush()
    return number


def read_texts(path: Path) -> list[RecordedText]:
    """The texts of a file that `write_texts` wrote."""
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            rows = values.pop("behind")
            behind = {(before, tuple(drafts)): (ids, ps) for before, drafts, ids, ps in rows}
            texts.append(RecordedText(**values, behind=behind))
        except (TypeError, ValueError, KeyError) as error:
            raise EvalError(f"{path}, line {number}: must be a recorded text ({error!r})") from None
    if not texts:
        raise EvalError(f"{path} must have a text at least (got none)")
    return texts


def lessons_of(text: RecordedText, top_k: int) -> tuple[np.ndarray[Any, Any], TopK]:
    """What tables learn from the prompt, as sources take it."""
    pairs = np.array([pair for pair, _ in text.lessons], np.int64).reshape(-1, 2)
    return pairs, top_of([row for _, row in text.lessons], top_k)


def top_of(rows: Sequence[Row], top_k: int) -> TopK:
    """Rows as tables."""
    ids = np.array([ids[:top_k] for ids, _ in rows], np.int32).reshape(-1, top_k)
    probabilities = np.array([ps[:top_k] for _, ps in rows], np.float16).reshape(-1, top_k)
    return TopK(ids, probabilities)

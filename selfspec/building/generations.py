"""The model's own answers to prompts, with a `SelfSpec` that learns from each of them.

Answers go to a file as they come. With each batch what was learned is written first and then
the answers, so that the file never holds an answer that nothing was learned from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from selfspec.building.learned import Learned
from selfspec.building.limits import choice_of, max_positions, vocab_size
from selfspec.building.progress import Bar
from selfspec.building.recipe import Recipe
from selfspec.building.tokens import Ids
from selfspec.building.work_folder import WorkFolder
from selfspec.errors import BuildError
from selfspec.machine.device import own_seed
from selfspec.plugin.spec import SelfSpec

STAGE = "generations"
_FILE = "generations.jsonl"


class _Prompt(NamedTuple):
    document: int
    ids: Ids


class Generations:
    """One build's answers: those on disk, and where to go on."""

    def __init__(
        self, work: WorkFolder, recipe: Recipe, model: Any, tokenizer: Any, spec: SelfSpec
    ) -> None:
        self._work = work
        self._recipe = recipe
        self._model = model
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_prompt = _max_prompt(recipe, model)
        self._learned = Learned(work.part(STAGE), spec, vocab_size(model))
        self._path = work.folder / _FILE
        known = work.progress.get(STAGE, {})
        self.documents: int = known.get("documents", 0)  # When finished, this is the number of all.
        self.finished: bool = known.get("finished", False)
        self.answers, last = self._whole_batches()
        if not self.finished:
            self.documents = last + 1
        self._learned.restore(self.answers)

    def run(self, prompts: Iterable[Ids | None], bar: Bar) -> None:
        """Answers prompts; the first `self.documents` of the data must have been skipped."""
        usable = self._usable(prompts, bar)
        while batch := list(islice(usable, self._recipe.batch)):
            self._learned.restore(self.answers)
            answers = self._answer([prompt.ids for prompt in batch])
            self._learned.save(self.answers + len(batch))
            self._append(batch, answers)
            self.answers += len(batch)
            self._learned.keep_only(self.answers)
            bar.advance(0, sum(map(len, answers)))
        self.finished = True
        self._work.note(STAGE, {"documents": self.documents, "finished": True})

    def _usable(self, prompts: Iterable[Ids | None], bar: Bar) -> Iterator[_Prompt]:
        for document, ids in enumerate(prompts, start=self.documents):
            self.documents = document + 1
            bar.advance(1)
            if ids is not None and len(ids) <= self._max_prompt:
                yield _Prompt(document, ids)

    def _answer(self, prompts: list[Ids]) -> list[list[int]]:
        """What the model answers to each prompt, with the end-of-text token."""
        width = max(map(len, prompts))
        pad = self._pad_id()
        input_ids = torch.full((len(prompts), width), pad, dtype=torch.long, device="cpu")
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(prompts):
            input_ids[row, width - len(ids) :] = torch.from_numpy(ids.astype(np.int64))
            mask[row, width - len(ids) :] = 1
        device = self._model.device
        # A batch draws the same numbers whether or not it is the first of a process.
        with own_seed(self._recipe.seed + self.answers, [device]):
            output = self._model.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                custom_generate=partial(self._spec, streamer=None),
                max_new_tokens=self._recipe.max_new_tokens,
                pad_token_id=pad,
                **choice_of(self._recipe.temperature),
            )
        return [self._cut(row) for row in output[:, width:].tolist()]

    def _pad_id(self) -> int:
        for id_ in (self._tokenizer.pad_token_id, *self._end_ids()):
            if id_ is not None:
                return int(id_)
        return 0

    def _end_ids(self) -> list[int]:
        end = self._model.generation_config.eos_token_id
        return [end] if isinstance(end, int) else list(end or [])

    def _cut(self, ids: list[int]) -> list[int]:
        """The answer without the padding behind its end-of-text token."""
        ends = set(self._end_ids())
        stop = next((i + 1 for i, id_ in enumerate(ids) if id_ in ends), len(ids))
        return ids[:stop]

    def _append(self, batch: list[_Prompt], answers: list[list[int]]) -> None:
        lines = [self._line(*pair) for pair in zip(batch, answers, strict=True)]
        with self._path.open("ab") as stream:
            stream.write("".join(lines).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def _line(self, prompt: _Prompt, answer: list[int]) -> str:
        fields = {
            "document": prompt.document,
            "prompt_end": prompt.ids[-self._recipe.max_prefix :].tolist(),
            "ids": answer,
            "text": self._tokenizer.decode(answer, skip_special_tokens=True),
        }
        return f"{json.dumps(fields)}\n"

    def _whole_batches(self) -> tuple[int, int]:
        """The number of answers in whole batches, and the last one's document; drops the others."""
        if not self._path.exists():
            return 0, -1
        data = self._path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        number = max(step for step in self._learned.steps() if step <= len(lines))
        with self._path.open("r+b") as stream:
            stream.truncate(sum(map(len, lines[:number])))
        return number, json.loads(lines[number - 1])["document"] if number else -1


def read_answers(folder: Path, skip: int = 0) -> Iterator[Ids]:
    """Each answer behind the last tokens of its prompt, as a document to count.

    The n-grams of the prompt itself are not counted, because the context source finds them when
    the prompt is given again. Only its last tokens are, as the prefixes that answers begin with.
    """
    with (folder / _FILE).open(encoding="utf-8") as lines:
        for line in islice(lines, skip, None):
            fields = json.loads(line)
            yield np.array([*fields["prompt_end"], *fields["ids"]], np.uint32)


def _max_prompt(recipe: Recipe, model: Any) -> int:
    positions = max_positions(model)
    if positions is None:
        return recipe.max_prompt_tokens
    if recipe.max_new_tokens >= positions:
        raise BuildError(
            f"max_new_tokens must leave room for a prompt in the model's {positions} positions "
            f"(got {recipe.max_new_tokens})"
        )
    return min(recipe.max_prompt_tokens, positions - recipe.max_new_tokens)

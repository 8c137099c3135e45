"""The model's own answers to prompts: a batch run that remembers, in a folder beside the cache.

An answer is written down as soon as it is complete, so that a run that was stopped goes on where it
was. The folder belongs to one model, one set of settings and one list of prompts, and is refused
for others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from selfspec.batch import generate_many
from selfspec.building.documents import TokenIds
from selfspec.building.limits import choice_of, max_positions
from selfspec.building.recipe import Recipe, option_of
from selfspec.cache import SUFFIX
from selfspec.errors import BuildError
from selfspec.machine.user_files import locked
from selfspec.plugin.spec import SelfSpec

_FILE = "answers.jsonl"
_MEMORY = f"memory{SUFFIX}"
_SAVE_SECONDS = 30.0  # What was learned since is lost if the process is killed.


def folder_of(cache: Path) -> Path:
    """Where the answers for a cache are kept while it is being built."""
    return cache.with_suffix(".answers") if cache.suffix == SUFFIX else Path(f"{cache}.answers")


@contextmanager
def opened_folder(cache: Path) -> Iterator[Path]:
    """The folder of a cache that is being built, kept from other processes."""
    folder = folder_of(cache)

    def refused(holder: str) -> BuildError:
        return BuildError(
            f"{str(cache)!r} is being built by {holder}; wait for it, or build elsewhere"
        )

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"the cache must be in a folder that can be written (got {str(cache)!r}: "
            f"{error.strerror})"
        ) from error
    with locked(folder / "lock", refused):
        yield folder


class OwnAnswers:
    """The answers of one build: those on disk, and those to come.

    Args:
        folder: Where answers and what is learned from them are kept.
        settings: What decides about answers, beside the prompts.
        prompts: The prompts that can be answered, in order.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], prompts: Sequence[TokenIds]
    ) -> None:
        self._folder = folder
        self._path = folder / _FILE
        self._prompts = prompts
        self._answered: dict[int, list[int]] = {}  # By the index of the prompt.
        self._read(json.loads(json.dumps(settings)))

    @property
    def memory(self) -> Path:
        """Where a `SelfSpec` remembers what the answers taught it."""
        return self._folder / _MEMORY

    @property
    def num_answers(self) -> int:
        """How many prompts are answered by now."""
        return len(self._answered)

    def complete(
        self,
        model: Any,
        tokenizer: Any,
        spec: SelfSpec,
        recipe: Recipe,
        tell: Callable[[int, int], None],
    ) -> None:
        """Has the model answer what is left; `tell` gets 1 and the number of tokens of each."""
        left = [index for index in range(len(self._prompts)) if index not in self._answered]
        answers = generate_many(
            model,
            tokenizer,
            [self._prompts[index].tolist() for index in left],
            assistant=spec,
            max_rows=recipe.batch,
            # No two answers share a seed, so that a prompt that comes twice has two answers.
            seed=recipe.seed + max(self._answered, default=-1) + 1,
            max_new_tokens=recipe.max_new_tokens,
            **choice_of(recipe.temperature),
        )
        saved_at = monotonic()
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                for answer in answers:
                    index = left[answer.index]
                    fields = {"prompt": index, "checksum": _checksum(self._prompts[index])}
                    stream.write(json.dumps({**fields, "ids": answer.ids}) + "\n")
                    stream.flush()
                    self._answered[index] = answer.ids
                    tell(1, len(answer.ids))
                    if monotonic() - saved_at > _SAVE_SECONDS:
                        spec.save_memory()
                        saved_at = monotonic()
        finally:
            spec.save_memory()

    def documents(self, max_prefix: int) -> Iterator[TokenIds]:
        """Each answer behind the last tokens of its prompt, in the order of the prompts.

        The n-grams of the prompt itself are not counted, because the context source finds them when
        the prompt is given again. Only its last tokens are, as the prefixes that answers begin
        with.
        """
        for index, prompt in enumerate(self._prompts):
            yield np.array([*prompt[-max_prefix:], *self._answered[index]], np.int64)

    def _read(self, settings: dict[str, Any]) -> None:
        """Takes what an earlier start has answered; refuses what belongs to another build."""
        data = self._path.read_bytes() if self._path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            if self.memory.exists():
                raise self._other("what was learned, without the answers")
            self._path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
            return
        first, *lines = whole.splitlines()
        try:
            known = dict(json.loads(first)["settings"])
            answers = [json.loads(line) for line in lines]
            found = {each["prompt"]: (each["checksum"], each["ids"]) for each in answers}
        except (KeyError, TypeError, ValueError) as error:
            raise self._other("a file that can't be read") from error
        for key in sorted({*known, *settings}):
            if known.get(key) != settings.get(key):
                was, now = known.get(key), settings.get(key)
                raise self._other(f"{option_of(key)} was {was!r:.80}, is {now!r:.80}")
        for index, (checksum, ids) in found.items():
            if index >= len(self._prompts) or checksum != _checksum(self._prompts[index]):
                raise self._other(f"--data had another prompt {index}")
            self._answered[index] = ids
        os.truncate(self._path, len(whole))

    def _other(self, reason: str) -> BuildError:
        return BuildError(
            f"{str(self._folder)!r} holds the answers of another build ({reason}); undo the change "
            "to go on with it, or delete that folder to begin anew"
        )


def usable(prompts: Iterable[TokenIds | None], recipe: Recipe, model: Any) -> list[TokenIds | None]:
    """The prompts that the model can answer; None for one that is empty or too long."""
    longest, positions = recipe.max_prompt_tokens, max_positions(model)
    if positions is not None:
        if recipe.max_new_tokens >= positions:
            raise BuildError(
                "--max-new-tokens must leave room for a prompt in the model's "
                f"{positions} positions (got {recipe.max_new_tokens})"
            )
        longest = min(longest, positions - recipe.max_new_tokens)
    return [None if ids is None or len(ids) > longest else ids for ids in prompts]


def _checksum(ids: TokenIds) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:12]

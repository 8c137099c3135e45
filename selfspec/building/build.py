"""Builds a cache from a recipe and a model.

The model's own answers are a batch run that remembers, in a folder beside the cache: the prompts,
the answers as they come, and what they taught. So a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from selfspec.batch.session import Session
from selfspec.building.grams import GramCounter
from selfspec.building.limits import max_positions, vocab_size
from selfspec.building.reading import prefix_of, teach
from selfspec.building.recipe import Recipe
from selfspec.building.texts import TokenIds, read_ids
from selfspec.cache import SUFFIX, CacheContents, check_target, save_cache, tokenizer_info
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import BuildError, CliError
from selfspec.machine.memory import free_memory
from selfspec.machine.user_files import replace_text
from selfspec.plugin.spec import SelfSpec
from selfspec.serving.batch_file import BatchFiles, results
from selfspec.serving.prompt_files import Encoder

# A model that is decoded plainly would teach nothing, so it is refused. The budget is fixed because
# a cache should not depend on how fast the machine is.
_KNOBS: dict[str, Any] = {"strict": True, "budget": "fixed", "max_nodes": 16}
_MEMORY = "memory"  # The file of what answers taught.
_MAX_MEMORY = 1 << 32  # In bytes, for counting; what does not fit loses its rarest n-grams.
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(14),
    MofNCompleteColumn(),
    TextColumn("{task.fields[tokens]:,} tokens"),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
)


def build_cache(
    recipe: Recipe,
    output: Path,
    tokenizer: Any,
    load_model: Callable[[], Any],
    *,
    console: Console,
    model_name: str | None = None,
    overwrite: bool = False,
) -> CacheContents:
    """Builds the cache `output`; returns what is in it.

    Args:
        load_model: Called when the model itself is needed, not only its tokenizer.
        console: Shows how far the build is.
        model_name: What the user called it; None for the embedded one.
        overwrite: Replaces a cache that is there.
    """
    target = check_target(output, overwrite=overwrite)
    if recipe.uses_template and not tokenizer.chat_template:
        raise BuildError(
            "--chat-template needs a tokenizer with a template (got one without); pass "
            "--no-chat-template, or name another --model"
        )
    documents = read_ids(recipe, tokenizer)
    first = list(islice(documents, 1))
    if not first:  # Data of the wrong kind is refused before any work.
        raise BuildError(f"--data must hold a document (got {recipe.data!r})")
    documents = chain(first, documents)
    build = _Build(recipe, tokenizer, load_model, console, model_name)
    folder = folder_of(target)
    contents = (
        build.from_answers(documents, folder) if recipe.generates else build.from_text(documents)
    )
    save_cache(target, contents, overwrite=overwrite)
    if recipe.generates:
        shutil.rmtree(folder)
    return contents


def folder_of(cache: Path) -> Path:
    """Where the answers for a cache are kept while it is being built."""
    return cache.with_name(f"{cache.name.removesuffix(SUFFIX)}.answers")


@dataclass
class _Build:
    """One cache being built."""

    recipe: Recipe
    tokenizer: Any
    load_model: Callable[[], Any]
    console: Console
    model_name: str | None
    facts: dict[str, Any] = field(default_factory=dict)  # Numbers for the card.

    def from_text(self, documents: Iterable[TokenIds | None]) -> CacheContents:
        """A cache of what stands in the documents, and of what the model makes of them."""
        recipe, tables = self.recipe, {}
        if recipe.wants_lut:
            model = self.load_model().eval()
            memory = SelfSpec(**_KNOBS).memory(vocab_size(model))
            prefix = prefix_of(recipe, self.tokenizer)
            read = teach(memory, model, documents, recipe, prefix=prefix)
            done = self._show("reading", recipe.warmup_tokens or None, ((n, n) for n in read))
            self.facts["tokens_read"] = self._some(done, "a document with text in it")
            tables = memory.tables()
            documents = read_ids(recipe, self.tokenizer)
        corpus = self._counted(documents, recipe.max_documents) if recipe.wants_ngrams else None
        return self._contents(tables=tables, corpus=corpus)

    def from_answers(self, documents: Iterable[TokenIds | None], folder: Path) -> CacheContents:
        """A cache of what the model answers, and of what is learned on the way."""
        recipe = self.recipe
        model = self.load_model().eval()
        positions = max_positions(model)
        if positions is not None and recipe.max_new_tokens >= positions:
            raise BuildError(
                "--max-new-tokens must leave room for a prompt in the model's "
                f"{positions} positions (got {recipe.max_new_tokens})"
            )
        prompts = list(documents)
        asked = [ids for ids in prompts if ids is not None and len(ids) <= recipe.max_prompt_tokens]
        self._some(len(asked), "a prompt that the model can answer")
        files = self._files(folder, model, asked)
        spec = SelfSpec(remember=folder / _MEMORY, tokenizer=self.tokenizer, **_KNOBS)
        self._answer(files, model, spec, len(asked))
        answers = list(_answers(files, asked, recipe.max_prefix))
        self._some(len(answers), "a prompt that the model can answer")
        found: dict[str, Any] = {}
        if recipe.wants_ngrams:
            found["corpus"] = self._counted(answers, len(answers))
        if recipe.wants_lut:
            memory = spec.memory(vocab_size(model))
            found |= {"tables": memory.tables(), "calibration": memory.calibration.rows()}
        left_out = len(prompts) - len(answers)
        self.facts |= {"prompts": len(prompts), "answers": len(answers), "left_out": left_out}
        return self._contents(**found)

    def _files(self, folder: Path, model: Any, asked: Sequence[TokenIds]) -> BatchFiles:
        """The files of the batch run. All that decides about an answer stands in its line."""
        recipe = self.recipe
        shared = {
            "model": f"{self.model_name} in {model.dtype}",
            "max_tokens": recipe.max_new_tokens,
            "temperature": recipe.temperature,
        }
        lines = (
            # No two answers share a seed, so that a prompt that comes twice has two answers.
            json.dumps({"body": {**shared, "seed": recipe.seed + index, "prompt": ids.tolist()}})
            for index, ids in enumerate(asked)
        )
        replace_text(folder / "prompts.jsonl", "".join(f"{line}\n" for line in lines))
        return BatchFiles(folder / "prompts.jsonl", folder / "answers.jsonl")

    def _answer(self, files: BatchFiles, model: Any, spec: SelfSpec, total: int) -> None:
        """Has the model answer what is left."""
        with files.locked():
            try:
                progress = files.progress()
            except CliError as error:
                raise BuildError(
                    f"{str(files.answers.parent)!r} holds the answers of another build, to other "
                    "data or with other settings; undo the change to go on with it, or delete that "
                    "folder to begin anew"
                ) from error
            files.begin(progress)
            if len(progress.left) == total:
                # What unfinished answers of an earlier run, perhaps to other prompts, taught.
                (files.answers.parent / f"{_MEMORY}{SUFFIX}").unlink(missing_ok=True)
            session = Session(model, self.tokenizer, spec, max_rows=self.recipe.batch)
            encoder = Encoder(self.tokenizer, vocab_size(model), max_positions(model))
            lines = files.open_lines(progress)
            found = results(lines, session, encoder, model_name="", seed=0)

            def written() -> Iterator[tuple[int, int]]:
                for result in found:
                    files.write(result)
                    yield 1, result.num_tokens

            try:
                self._show("answering", total, written(), done=total - len(progress.left))
            finally:
                spec.save_memory()

    def _counted(self, documents: Iterable[TokenIds | None], total: int | None) -> CorpusTables:
        recipe = self.recipe
        counter = GramCounter(
            vocab_size=tokenizer_info(self.tokenizer).vocab_size,
            max_prefix=recipe.max_prefix,
            max_memory=min(_MAX_MEMORY, free_memory() // 2),
        )
        counts = Counter(documents=0, tokens=0, left_out=0)

        def added() -> Iterator[tuple[int, int]]:
            for ids in documents:
                num_tokens = 0 if ids is None else len(ids)
                if ids is not None:
                    counter.add(ids)
                counts.update(
                    documents=bool(num_tokens), tokens=num_tokens, left_out=not num_tokens
                )
                yield 1, num_tokens

        self._show("counting", total, added())
        self._some(counts["tokens"], "a document with text in it")
        tables = counter.tables(
            min_count=recipe.min_count,
            max_continuations=recipe.max_continuations,
            max_bytes=recipe.max_size,
        )
        self.facts |= {**counts, "min_counts": list(tables.min_counts)}
        return tables

    def _show(
        self, title: str, total: int | None, parts: Iterable[tuple[int, int]], *, done: int = 0
    ) -> int:
        """Goes through parts of work, as (amount, tokens), with a bar; returns the tokens."""
        tokens = 0
        with Progress(*_COLUMNS, console=self.console) as bar:
            task = bar.add_task(title, total=total, completed=done, tokens=0)
            for amount, num_tokens in parts:
                tokens += num_tokens
                bar.update(task, advance=amount, tokens=tokens)
            bar.update(task, total=bar.tasks[task].completed)
        return tokens

    def _contents(self, **parts: Any) -> CacheContents:
        """All of it with what the card says of its origin, without times, paths or machines."""
        recipe = self.recipe
        about = _without_folders(recipe)
        owner = tokenizer_info(self.tokenizer)
        model = owner.name or self.model_name
        asks_model = recipe.wants_lut or recipe.generates
        return CacheContents(
            tokenizer=owner,
            about={
                "name": about.pop("name"),
                "licence": about.pop("licence"),
                **({"model": model} if asks_model else {}),
                **self.facts,
                "recipe": about,
            },
            **parts,
        )

    def _some(self, number: int, what: str) -> int:
        if not number:
            raise BuildError(f"--data must hold {what} (got {self.recipe.data!r})")
        return number


def _answers(files: BatchFiles, asked: Sequence[TokenIds], max_prefix: int) -> Iterator[TokenIds]:
    """Each answer behind the last tokens of its prompt.

    The n-grams of the prompt itself are not counted, because the context source finds them when the
    prompt is given again. Only its last tokens are, as the prefixes that answers begin with.
    """
    if not files.answers.exists():
        return
    with files.answers.open("rb") as stream:
        for answer in map(json.loads, stream):
            prompt = asked[answer["line"] - 1]
            yield np.array([*prompt[-max_prefix:], *answer["ids"]], np.int64)


def _without_folders(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a card may show it to everybody: local files without their folders."""
    data = Path(recipe.data).expanduser()
    files = [Path(each).expanduser() for each in recipe.data_files]
    return {
        **recipe.model_dump(),
        "data": data.resolve().name if data.exists() else recipe.data,
        "data_files": [file.name if file.is_absolute() else str(file) for file in files],
    }

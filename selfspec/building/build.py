"""Builds a cache from a recipe and a model."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from selfspec.building.answers import OwnAnswers, folder_of, opened_folder, usable
from selfspec.building.documents import TokenIds
from selfspec.building.grams import GramCounter
from selfspec.building.limits import vocab_size
from selfspec.building.progress import Bars
from selfspec.building.reading import teach
from selfspec.building.recipe import Recipe
from selfspec.building.tokens import prefix_of, read_ids
from selfspec.cache import CacheContents, check_target, save_cache, tokenizer_info
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import BuildError
from selfspec.plugin.spec import SelfSpec

# A model that is decoded plainly would teach nothing, so it is refused. The budget is fixed because
# a cache should not depend on how fast the machine is.
_KNOBS: dict[str, Any] = {"strict": True, "budget": "fixed", "max_nodes": 16}


def build_cache(
    recipe: Recipe,
    output: Path,
    tokenizer: Any,
    load_model: Callable[[], Any],
    *,
    bars: Bars,
    model_name: str | None = None,
    max_memory: int = 1 << 32,
    overwrite: bool = False,
) -> CacheContents:
    """Builds the cache `output`; returns what is in it.

    Args:
        load_model: Called when the model itself is needed, not only its tokenizer.
        bars: Show how far the build is.
        model_name: What the user called it; None for the embedded one.
        max_memory: Bytes for counting n-grams, without tokenizer and model.
        overwrite: Replaces a cache that is there.
    """
    target = check_target(output, overwrite=overwrite)
    if recipe.uses_template and not tokenizer.chat_template:
        raise BuildError(
            "--chat-template needs a tokenizer with a template (got one without); pass "
            "--no-chat-template, or name another --model"
        )
    documents = _with_a_document(read_ids(recipe, tokenizer), recipe)
    build = _Build(recipe, tokenizer, load_model, bars, max_memory, model_name)
    contents = (
        build.from_answers(documents, target) if recipe.generates else build.from_text(documents)
    )
    save_cache(target, contents, overwrite=overwrite)
    if recipe.generates:
        shutil.rmtree(folder_of(target))
    return contents


class _Build:
    """One cache being built."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        load_model: Callable[[], Any],
        bars: Bars,
        max_memory: int,
        model_name: str | None,
    ) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._load_model = load_model
        self._bars = bars
        self._max_memory = max_memory
        self._model_name = model_name
        self._facts: dict[str, Any] = {}  # Numbers for the card.

    def from_text(self, documents: Iterable[TokenIds | None]) -> CacheContents:
        """A cache of what stands in the documents, and of what the model makes of them."""
        recipe, tables = self._recipe, {}
        if recipe.wants_lut:
            model, spec = self._load_model().eval(), SelfSpec(**_KNOBS)
            memory = spec.memory(vocab_size(model))
            bar = self._bars.stage("reading", recipe.warmup_tokens or None)
            prefix = prefix_of(recipe, self._tokenizer)
            tell = bar.advance
            read = teach(memory, model, documents, recipe, prefix=prefix, tell=tell)
            bar.end()
            self._facts["tokens_read"] = self._some(read, "a document with text in it")
            tables = memory.tables()
            documents = read_ids(recipe, self._tokenizer)
        corpus = self._counted(documents, recipe.max_documents) if recipe.wants_ngrams else None
        return self._contents(tables=tables, corpus=corpus)

    def from_answers(self, documents: Iterable[TokenIds | None], output: Path) -> CacheContents:
        """A cache of what the model answers, and of what is learned on the way."""
        recipe, tokenizer = self._recipe, self._tokenizer
        model = self._load_model().eval()
        prompts = usable(documents, recipe, model)
        asked = [ids for ids in prompts if ids is not None]
        self._some(len(asked), "a prompt that the model can answer")
        with opened_folder(output) as folder:
            answers = OwnAnswers(folder, self._answer_settings(model), asked)
            spec = SelfSpec(remember=answers.memory, tokenizer=tokenizer, **_KNOBS)
            bar = self._bars.stage("generating", len(asked), done=answers.num_answers)
            answers.complete(model, tokenizer, spec, recipe, bar.advance)
            bar.end()
            memory = spec.memory(vocab_size(model))  # Also where all was answered before.
        found: dict[str, Any] = {}
        if recipe.wants_ngrams:
            found["corpus"] = self._counted(answers.documents(recipe.max_prefix), len(asked))
        if recipe.wants_lut:
            found |= {"tables": memory.tables(), "calibration": memory.calibration.rows()}
        left_out = len(prompts) - len(asked)
        self._facts |= {"prompts": len(prompts), "answers": len(asked), "left_out": left_out}
        return self._contents(**found)

    def _counted(self, documents: Iterable[TokenIds | None], total: int | None) -> CorpusTables:
        recipe = self._recipe
        counter = GramCounter(
            vocab_size=tokenizer_info(self._tokenizer).vocab_size,
            max_prefix=recipe.max_prefix,
            max_memory=self._max_memory,
        )
        bar = self._bars.stage("counting", total)
        counts = Counter(documents=0, tokens=0, left_out=0)
        for ids in documents:
            num_tokens = 0 if ids is None else len(ids)
            if ids is not None:
                _add(counter, ids)
            counts.update(documents=bool(num_tokens), tokens=num_tokens, left_out=not num_tokens)
            bar.advance(1, num_tokens)
        bar.end()
        self._some(counts["tokens"], "a document with text in it")
        tables = counter.tables(
            min_count=recipe.min_count,
            max_continuations=recipe.max_continuations,
            max_bytes=recipe.max_size,
        )
        self._facts |= {**counts, "min_counts": list(tables.min_counts)}
        return tables

    def _contents(self, **parts: Any) -> CacheContents:
        """All of it with what the card says of its origin, without times, paths or machines."""
        about = _without_folders(self._recipe)
        recipe = {key: value for key, value in about.items() if key not in ("name", "licence")}
        model = tokenizer_info(self._tokenizer).name or self._model_name
        asks_model = self._recipe.wants_lut or self._recipe.generates
        return CacheContents(
            tokenizer=tokenizer_info(self._tokenizer),
            about={
                "name": about["name"],
                "licence": about["licence"],
                **({"model": model} if asks_model else {}),
                **self._facts,
                "recipe": recipe,
            },
            **parts,
        )

    def _answer_settings(self, model: Any) -> dict[str, Any]:
        """What decides about an answer, beside its prompt."""
        keys = ("max_new_tokens", "temperature", "seed")
        chosen = {key: getattr(self._recipe, key) for key in keys}
        return {"model": self._model_name, "dtype": str(model.dtype), **chosen}

    def _some(self, number: int, what: str) -> int:
        if not number:
            raise BuildError(f"--data must hold {what} (got {self._recipe.data!r})")
        return number


def _add(counter: GramCounter, ids: TokenIds) -> None:
    try:
        counter.add(ids)
    except ValueError as error:
        raise BuildError(f"the tokens of --data must be the tokenizer's: {error}") from error


def _with_a_document(
    documents: Iterator[TokenIds | None], recipe: Recipe
) -> Iterator[TokenIds | None]:
    """The same, once the first one was read: data of the wrong kind is refused before any work."""
    for first in documents:
        return chain([first], documents)
    raise BuildError(f"--data must hold a document (got {recipe.data!r})")


def _without_folders(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a card may show it to everybody: local files without their folders."""
    data = Path(recipe.data).expanduser()
    files = [Path(each).expanduser() for each in recipe.data_files]
    return {
        **recipe.model_dump(),
        "data": data.resolve().name if data.exists() else recipe.data,
        "data_files": [file.name if file.is_absolute() else str(file) for file in files],
    }

"""Builds a cache from a recipe and, if it asks for what a model predicts, from a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich import progress as rich
from rich.console import Console

from selfspec.building.reading import prefix_of, teach
from selfspec.building.recipe import Recipe
from selfspec.building.texts import TokenIds, read_ids
from selfspec.cache import CacheContents, check_target, save_cache, tokenizer_info
from selfspec.cache.contents import Arrays
from selfspec.cache.learned_on_demand import LearnedOnDemand
from selfspec.config import SpecConfig
from selfspec.draft.sources.texts import MAX_TOKENS
from selfspec.errors import BuildError
from selfspec.forward.model import vocab_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_COLUMNS = (
    "{task.description}",
    rich.BarColumn(14),
    rich.MofNCompleteColumn(),
    "{task.fields[tokens]:,} tokens",
    rich.TimeElapsedColumn(),
    "left",
    rich.TimeRemainingColumn(),
)


def build_cache(
    recipe: Recipe,
    output: Path,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
    *,
    console: Console,
    model_name: str | None = None,
    overwrite: bool = False,
) -> CacheContents:
    """Builds the cache `output`; returns what is in it.

    `load_model` is called when the model itself is needed. `model_name` is what the user called it;
    None for the embedded one.
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
    contents = _Build(recipe, tokenizer, load_model, console, model_name).of(documents)
    save_cache(target, contents, overwrite=overwrite)
    return contents


@dataclass
class _Build:
    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    load_model: Callable[[], PreTrainedModel]
    console: Console
    model_name: str | None
    facts: dict[str, Any] = field(default_factory=dict)  # Numbers for the card.

    def of(self, documents: Iterable[TokenIds | None]) -> CacheContents:
        recipe, tables = self.recipe, dict[str, Arrays]()
        if recipe.wants_lut:
            model = self.load_model().eval()
            learned = LearnedOnDemand(SpecConfig()).of(vocab_size(model))
            prefix = prefix_of(recipe, self.tokenizer)
            read = teach(learned, model, documents, recipe, prefix=prefix)
            done = self._show("reading", recipe.warmup_tokens or None, ((n, n) for n in read))
            self.facts["tokens_read"] = self._some(done, "a document with text in it")
            tables = dict(learned.tables())
            documents = read_ids(recipe, self.tokenizer)
        texts = self._texts(documents, recipe.max_documents) if recipe.wants_texts else None
        return self._contents(tables, texts)

    def _texts(self, documents: Iterable[TokenIds | None], total: int | None) -> NDArray[np.int32]:
        """The first documents, each with -1 after it, as many tokens as a `SelfSpec` keeps."""
        texts: list[TokenIds] = []
        counts = Counter(documents=0, tokens=0, left_out=0)

        def kept() -> Iterator[tuple[int, int]]:
            for ids in documents:
                num_tokens = 0 if ids is None else len(ids)
                if ids is not None and num_tokens:
                    texts.append(np.append(ids, -1))
                counts.update(
                    documents=bool(num_tokens), tokens=num_tokens, left_out=not num_tokens
                )
                yield 1, num_tokens
                if counts["tokens"] + counts["documents"] >= MAX_TOKENS:
                    return

        self._show("keeping", total, kept())
        self._some(counts["tokens"], "a document with text in it")
        self.facts |= counts
        kept_ids = np.concatenate(texts)[:MAX_TOKENS].astype(np.int32)
        kept_ids[-1] = -1  # The last one may have been cut.
        return kept_ids

    def _show(self, title: str, total: int | None, parts: Iterable[tuple[int, int]]) -> int:
        """Goes through parts of work, as (amount, tokens), with a bar; returns the tokens."""
        tokens = 0
        with rich.Progress(*_COLUMNS, console=self.console) as bar:
            task = bar.add_task(title, total=total, tokens=0)
            for amount, num_tokens in parts:
                tokens += num_tokens
                bar.update(task, advance=amount, tokens=tokens)
            bar.update(task, total=bar.tasks[task].completed)
        return tokens

    def _contents(
        self, tables: dict[str, Arrays], texts: NDArray[np.int32] | None
    ) -> CacheContents:
        """The finished parts and, for the card, their origin, without times, paths or machines."""
        recipe = self.recipe
        about = _without_folders(recipe)
        owner = tokenizer_info(self.tokenizer)
        model = owner.name or self.model_name
        facts = {"model": model, **self.facts} if recipe.wants_lut else self.facts
        name, licence = about.pop("name"), about.pop("licence")
        return CacheContents(
            tokenizer=owner,
            tables=tables,
            answers=texts,
            about={"name": name, "licence": licence, **facts, "recipe": about},
        )

    def _some(self, number: int, what: str) -> int:
        if not number:
            raise BuildError(f"--data must hold {what} (got {self.recipe.data!r})")
        return number


def _without_folders(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a card may show it to everybody: local files without their folders."""
    data = Path(recipe.data).expanduser()
    files = [Path(name).expanduser() for name in recipe.data_files]
    return {
        **recipe.model_dump(),
        "data": data.resolve().name if data.exists() else recipe.data,
        "data_files": [file.name if file.is_absolute() else str(file) for file in files],
    }

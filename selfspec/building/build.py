"""Builds a cache from a recipe and, if it asks for what a model predicts, from a model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich import progress as rich
from rich.console import Console

from selfspec.building.reading import prefix_of, teach
from selfspec.building.recipe import Recipe
from selfspec.building.texts import read_ids
from selfspec.cache import CacheContents, check_target, save_cache, tokenizer_info
from selfspec.cache.contents import Arrays
from selfspec.cache.learned_on_demand import LearnedOnDemand
from selfspec.config import SpecConfig
from selfspec.draft.sources.texts import MAX_TOKENS
from selfspec.errors import BuildError
from selfspec.forward.model import vocab_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    owner = tokenizer_info(tokenizer)
    about = _without_folders(recipe)
    # The card has no times, paths or machines: the same texts give the same file.
    card: dict[str, Any] = {"name": about.pop("name"), "licence": about.pop("licence")}
    tables: dict[str, Arrays] = {}
    answers = None
    if recipe.wants_lut:
        tables, card["tokens_read"] = _tables(recipe, tokenizer, load_model, console)
        card["model"] = owner.name or model_name
    if recipe.wants_texts:
        texts, card["left_out"] = _texts(recipe, tokenizer)
        card["documents"], card["tokens"] = len(texts), sum(map(len, texts)) - len(texts)
        answers = np.concatenate(texts)[:MAX_TOKENS].astype(np.int32)
        answers[-1] = -1  # The last one may have been cut.
    card["recipe"] = about
    contents = CacheContents(tokenizer=owner, tables=tables, answers=answers, about=card)
    save_cache(target, contents, overwrite=overwrite)
    return contents


def _tables(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
    console: Console,
) -> tuple[dict[str, Arrays], int]:
    """The LUTs that the model has filled, and how many tokens it has read for them."""
    documents = read_ids(recipe, tokenizer)
    first = list(islice(documents, 1))
    if not first:  # Before the model is loaded.
        raise _nothing(recipe)
    model = load_model().eval()
    learned = LearnedOnDemand(SpecConfig()).of(vocab_size(model))
    prefix = prefix_of(recipe, tokenizer)
    num_read = 0
    with rich.Progress(*rich.Progress.get_default_columns(), console=console) as bar:
        task = bar.add_task("reading", total=recipe.warmup_tokens or None)
        for num_tokens in teach(learned, model, chain(first, documents), recipe, prefix=prefix):
            num_read += num_tokens
            bar.update(task, completed=num_read, description=f"{num_read:,} tokens read")
        bar.update(task, total=num_read)  # The data may end before.
    if not num_read:
        raise _nothing(recipe)
    return dict(learned.tables()), num_read


def _texts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[NDArray[np.int64]], int]:
    """The first documents, each with -1 after it, and how many empty ones were left out.

    They have as many tokens as a `SelfSpec` keeps, or more by a part of the last one.
    """
    texts: list[NDArray[np.int64]] = []
    size = num_left_out = 0
    for ids in read_ids(recipe, tokenizer):
        if ids is None:
            num_left_out += 1
            continue
        texts.append(np.append(ids, -1))
        size += len(texts[-1])
        if size >= MAX_TOKENS:
            break
    if not texts:
        raise _nothing(recipe)
    return texts, num_left_out


def _nothing(recipe: Recipe) -> BuildError:
    return BuildError(f"--data must hold a document with text in it (got {recipe.data!r})")


def _without_folders(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a card may show it to everybody: local files without their folders."""
    data = Path(recipe.data).expanduser()
    files = [Path(name).expanduser() for name in recipe.data_files]
    return {
        **recipe.model_dump(),
        "data": data.resolve().name if data.exists() else recipe.data,
        "data_files": [file.name if file.is_absolute() else str(file) for file in files],
    }

"""`BuildWorker`: does parts of a build, in whatever process: counts documents, and reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selfspec.building.counting import CountedShard
from selfspec.building.documents import Document
from selfspec.building.grams import GramCounter
from selfspec.building.recipe import Recipe
from selfspec.building.tokens import Encoder, encode_all, prefix_of
from selfspec.building.warmup import Reader, Window
from selfspec.cache import tokenizer_info
from selfspec.config import SpecConfig
from selfspec.records import TopK


class BuildWorker:
    """One model, loaded when it is first needed, and one tokenizer."""

    def __init__(
        self, recipe: Recipe, tokenizer: Any, load_model: Callable[[], Any], *, max_memory: int
    ) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._load_model = load_model
        self._max_memory = max_memory

    def count(self, documents: list[Document]) -> CountedShard:
        """Counts the n-grams of documents."""
        encoder = Encoder.of(self._recipe, self._tokenizer)
        with TemporaryDirectory() as folder:
            counter = GramCounter(
                folder,
                vocab_size=tokenizer_info(self._tokenizer).vocab_size,
                max_prefix=self._recipe.max_prefix,
                max_memory=self._max_memory,
            )
            tokens = empty = 0
            for ids in encode_all(documents, encoder):
                empty += ids is None
                if ids is not None:
                    counter.add(ids)
                    tokens += len(ids)
            counter.flush()
            runs = [(Path(folder) / name).read_bytes() for name in counter.runs]
        return CountedShard(len(documents), tokens, empty, runs)

    def read(self, windows: list[Window]) -> list[TopK]:
        """What the model predicts after each token of each window."""
        return self._reader.read(windows)

    @cached_property
    def _reader(self) -> Reader:
        prefix = prefix_of(self._recipe, self._tokenizer)
        return Reader(self._load_model().eval(), SpecConfig().top_k, prefix)

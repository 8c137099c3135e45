"""A tiny tokenizer and model, and documents to read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from selfspec.building.build import build_cache
from selfspec.building.recipe import Recipe
from selfspec.cache import CacheContents
from tests.conftest import TEMPLATE
from tests.tiny import LINES, make_model, make_tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The readers of `datasets` leave files to the garbage collector."""
    for item in items:
        if "loads_datasets" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"))


@pytest.fixture
def loads_datasets() -> Iterator[None]:
    """For a test that reads through `datasets`: what that leaves open ends with the test."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level, with a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def model(tokenizer) -> Any:
    return make_model(len(tokenizer)).eval()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Short documents that share n-grams."""
    return [f"{LINES[i % 3]}{LINES[(i + 1) % 3]}number {i}\n" for i in range(9)]


@pytest.fixture
def lines(tmp_path, texts) -> Path:
    """A paragraph a document; read with form="paragraph"."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(texts))
    return path


@pytest.fixture
def build(tokenizer, model) -> Callable[..., CacheContents]:
    """Builds a cache."""

    def run(output: Path, **keys: Any) -> CacheContents:
        return build_cache(
            Recipe.of(**{"name": "tiny", "window": 16, "batch": 2, **keys}),
            output,
            tokenizer,
            lambda: model,
            console=Console(quiet=True),
            model_name="tiny",
        )

    return run

"""A tokenizer, and documents to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec.building import build_cache
from selfspec.cache import CacheContents
from tests.conftest import TEMPLATE
from tests.tiny import LINES, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level, with a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [f"{LINES[i % 3]}{LINES[(i + 1) % 3]}number {i}\n" for i in range(9)]


@pytest.fixture
def folder(tmp_path, texts) -> Path:
    """A file for each text."""
    path = tmp_path / "texts"
    path.mkdir()
    for index, text in enumerate(texts):
        (path / f"{index}.txt").write_text(text)
    return path


@pytest.fixture
def build(tokenizer) -> Callable[..., CacheContents]:
    return lambda data: build_cache(str(data), tokenizer)

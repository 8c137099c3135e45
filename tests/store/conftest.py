"""A cache folder on disk, and a home of its own for what is remembered."""

from pathlib import Path

import pytest

from selfspec.store import save_cache
from tests.caches import contents


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch) -> Path:
    """Where the memo goes; no test touches the user's own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    """A cache folder with every kind of file."""
    save_cache(tmp_path / "cache", contents())
    return tmp_path / "cache"

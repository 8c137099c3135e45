"""A folder of our own wherever the platform wants it, and files that are whole."""

import os
import sys
from pathlib import Path

import pytest

from selfspec.machine.user_files import replace_text, replacing, user_folder


@pytest.mark.parametrize(("platform", "tail"), [("linux", ".cache"), ("darwin", "Library/Caches")])
def test_where_platforms_keep_it(monkeypatch, tmp_path, platform, tail):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    assert user_folder() == tmp_path / tail / "selfspec"


def test_an_absolute_xdg_folder_is_taken_and_a_relative_one_ignored(monkeypatch, tmp_path):
    """As its specification asks."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_folder() == tmp_path / "xdg" / "selfspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert user_folder().is_relative_to(tmp_path / "home")


def test_no_home_at_all(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(no_home))
    assert user_folder() is None


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_is_replaced_whole(tmp_path, monkeypatch, step):
    path = tmp_path / "below" / "file.json"
    replace_text(path, "old")

    def fail(*_args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(OSError, match="disk full"), replacing(path) as file:
            file.write(b"new")
    assert path.read_text() == "old"
    replace_text(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]

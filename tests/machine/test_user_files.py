"""A folder of our own wherever the platform wants it, and files that are whole."""

import os
from pathlib import Path

import pytest

from selfspec.machine import user_files
from selfspec.machine.user_files import replace_text, replacing, user_folder


def test_it_is_in_the_cache_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "selfspec"


@pytest.mark.parametrize("is_old", [False, True])
def test_no_home_at_all(is_old, monkeypatch):
    """platformdirs raises an error, or in older versions names a folder in none."""

    def no_home(*_names, **_more):
        if is_old:
            return Path("~/.cache/selfspec")
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(user_files, "user_cache_path", no_home)
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

"""A folder of our own wherever the platform wants it, and files that are whole."""

import os
from pathlib import Path

import pytest

from selfspec.machine import user_files
from selfspec.machine.user_files import replace_bytes, replace_text, user_folder


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


def test_a_file_is_replaced_by_what_its_owner_may_read(tmp_path):
    path = tmp_path / "below" / "file.json"
    replace_text(path, "né")
    assert path.read_text(encoding="utf-8") == "né"
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    replace_bytes(path, b"new", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]

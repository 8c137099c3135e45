"""What a machine is called, amounts of memory, and where its user's files are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from selfspec.errors import ConfigError
from selfspec.machine import user_files
from selfspec.machine.device import device_name, processor
from selfspec.machine.memory import amount_in_bytes
from selfspec.machine.user_files import replace_bytes, user_folder


def test_there_is_a_name_without_linux_too() -> None:
    with mock.patch.object(Path, "read_text", side_effect=FileNotFoundError):
        assert processor.__wrapped__()


def test_a_device_is_named_by_what_runs_it() -> None:
    assert device_name(torch.device("cpu")) == processor()
    assert device_name(torch.device("mps")) == f"mps, {processor()}"
    with mock.patch("torch.cuda.get_device_name", return_value="a card"):
        assert device_name(torch.device("cuda")) == "a card"


AMOUNTS = {
    **{12345: 12345, "2GB": 2 * 10**9, "0.5 gb": 5 * 10**8, "3KiB": 3 * 1024, "12B": 12},
    **{"64M": 64_000_000, "500MiB": 500 << 20, "2": 2, "25%": 250, "12.5 %": 125, "0.01%": 1},
}
NO_AMOUNTS = ("", "GB", "-1GB", "%", "nan%", "inf%", "0%", "0", "0.1", "5i", "1e3")


def test_amounts() -> None:
    assert {text: amount_in_bytes(text, 1000) for text in AMOUNTS} == AMOUNTS


@pytest.mark.parametrize("text", [*NO_AMOUNTS, "9" * 400 + "GB", 0, -5, True, 1.5, None])
def test_what_is_no_amount(text: Any) -> None:
    with pytest.raises(ConfigError, match="max_memory"):
        amount_in_bytes(text, 1000)
    with pytest.raises(ConfigError, match=r"--size .*\(got '25%'\)"):  # a share of nothing
        amount_in_bytes("25%", name="--size")


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
    replace_bytes(path, "né".encode())
    assert path.read_text(encoding="utf-8") == "né"
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    replace_bytes(path, b"new", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]

"""Amounts as users write them, and what is free here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from selfspec.errors import ConfigError
from selfspec.machine import memory
from selfspec.machine.memory import amount_in_bytes, free_memory

AMOUNTS = {
    **{12345: 12345, "2GB": 2 * 10**9, "0.5 gb": 5 * 10**8, "3KiB": 3 * 1024, "12B": 12},
    **{"64M": 64_000_000, "500MiB": 500 << 20, "2": 2, "25%": 250, "12.5 %": 125, "0.01%": 1},
}


@pytest.mark.parametrize("text", AMOUNTS)
def test_amounts(text: Any) -> None:
    assert amount_in_bytes(text, 1000) == AMOUNTS[text]


@pytest.mark.parametrize(
    "text",
    [
        *("", "GB", "-1GB", "%", "nan%", "inf%", "0%", "0", "0.1", "5i", "1e3"),
        *("9" * 400 + "GB", 0, -5, True, 1.5, None),
    ],
)
def test_what_is_no_amount(text: Any) -> None:
    with pytest.raises(ConfigError, match="max_memory"):
        amount_in_bytes(text, 1000)
    with pytest.raises(ConfigError, match=r"--size .*\(got '25%'\)"):  # a share of nothing
        amount_in_bytes("25%", name="--size")


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 9000), ("6000", 5000), ("99999", 9000), ("none", 9000)]
)
def test_a_container_has_a_limit_of_its_own(
    limit: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    if limit != "none":
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000\n")
    assert free_memory() == free

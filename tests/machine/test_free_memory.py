"""What is free here: on the machine, or in our container if that has less."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from selfspec.machine import free_memory as module
from selfspec.machine.free_memory import free_memory


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 9000), ("6000", 5000), ("99999", 9000), ("none", 9000)]
)
def test_a_container_has_a_limit_of_its_own(
    limit: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    if limit != "none":
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000\n")
    assert free_memory() == free

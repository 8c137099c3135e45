"""What is free: on the machine, or in a container that has less."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from selfspec.machine import free_memory as module
from selfspec.machine.free_memory import free_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("1000", "400", 600), ("1000", "4000", 0), ("max", "400", None)]
)
def test_a_container_may_have_less(
    limit: str, used: str, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    assert 0 < free_memory(CPU) <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    if free is None:
        assert free_memory(CPU) > 1000
    else:
        assert free_memory(CPU) == free

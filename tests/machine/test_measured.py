"""Values are found under their own key, also by later processes, and a damaged file holds none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfspec.machine import measured
from selfspec.machine.measured import find_measured, keep_measured

KEY: dict[str, Any] = {"model": "llama 135M", "device": "a card", "rows": 1}
VALUES = {"0": {"widths": [1, 8, 64], "seconds": [0.01, 0.012, 0.03]}}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured._warn.cache_clear()
    monkeypatch.setattr(measured.atexit, "register", lambda _save: None)
    return tmp_path / "selfspec" / "measured.json"


def keep(key: dict[str, Any] = KEY, values: dict[str, Any] = VALUES) -> None:
    keep_measured([(key, values)])


def end() -> None:
    """What the end of a process does, and the begin of the next one."""
    measured._file(measured._path()).save()
    measured._file.cache_clear()


def now() -> None:
    """Nothing ends."""


@pytest.mark.parametrize("between", [end, now])
def test_values_are_found_again_and_others_are_added(between: Callable[[], None]) -> None:
    keep()
    between()
    assert find_measured(dict(reversed(KEY.items()))) == VALUES
    keep(values={"256": 1})
    keep(values={"256": 2})
    between()
    assert find_measured(KEY) == {**VALUES, "256": 2}
    for change in ({"rows": 2}, {"rows": "1"}, {"more": 1}):
        assert find_measured({**KEY, **change}) == {}


def test_the_file_is_written_once_in_some_minutes_and_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    monkeypatch.setattr(measured.time, "monotonic", lambda: seconds[0])
    for seconds[0], is_written in ((0, False), (299, False), (301, True)):
        keep()
        assert path.exists() == is_written
    kept = path.read_text()
    keep({"rows": 2})
    assert path.read_text() == kept
    code = "from selfspec.machine.measured import keep_measured; keep_measured([({'rows': 3}, {})])"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert '{\\"rows\\": 3}' in path.read_text()


def test_what_other_processes_keep_meanwhile_stays(path: Path) -> None:
    keep()
    end()
    find_measured(KEY)
    path.write_text(path.read_text().replace("card", "bus"))
    keep()
    end()
    assert find_measured(KEY) == find_measured({**KEY, "device": "a bus"}) == VALUES


DAMAGED = ("", "{", "[]", "[" * 100_000, '{"format": 3}', "\udcff", '{"format": 2, "entries": {}}')


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_foreign_file_is_empty_and_is_replaced(text: str, path: Path) -> None:
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert find_measured(KEY) == {}
    keep()
    end()
    assert find_measured(KEY) == VALUES


def test_the_file_stays_small(path: Path) -> None:
    keep_measured(({"rows": rows}, VALUES) for rows in range(200))
    end()
    assert len(json.loads(path.read_text())["entries"]) == 64
    assert (find_measured({"rows": 135}), find_measured({"rows": 136})) == ({}, VALUES)


@pytest.mark.parametrize("fault", ["no home", "no folder", "disk full"])
def test_what_can_not_be_kept_is_said_once(
    fault: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no home":
        monkeypatch.setattr(measured, "user_folder", lambda: None)
    elif fault == "no folder":
        path.parent.write_text("a file where a folder should be")
    else:
        monkeypatch.setattr(os, "replace", _disk_full)
    for _ in range(2):
        keep()
        end()
    assert find_measured(KEY) == {}
    (record,) = caplog.records
    assert "can't be kept for the next process" in record.message
    if fault == "disk full":
        assert {each.name for each in path.parent.iterdir()} <= {path.name}


def _disk_full(*_names: object) -> None:
    raise OSError(28, "No space left on device")

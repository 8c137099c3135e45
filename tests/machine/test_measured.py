"""Values are found under their own key for some days, and a damaged file holds none."""

from __future__ import annotations

import json
import os
from datetime import date, timedelta
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
    return tmp_path / "selfspec" / "measured.json"


def keep(key: dict[str, Any] = KEY, values: dict[str, Any] = VALUES) -> None:
    keep_measured([(key, values)])


def dated(days_ago: int) -> str:
    return str(date.today() - timedelta(days=days_ago))


def test_values_are_found_again_and_others_are_added() -> None:
    keep()
    assert find_measured(dict(reversed(KEY.items()))) == VALUES
    keep(values={"256": 1})
    keep(values={"256": 2})
    assert find_measured(KEY) == {**VALUES, "256": 2}
    for change in ({"rows": 2}, {"rows": "1"}, {"more": 1}):
        assert find_measured({**KEY, **change}) == {}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "3", "{}", "[" * 100_000, '{"format": 2}', "\udcff"),
        *('{"format": 1, "entries": {}}', '{"format": 2, "entries": {"x": {"date": 3}}}'),
    ],
    ids=range(11),
)
def test_a_damaged_or_foreign_file_is_empty_and_is_replaced(text: str, path: Path) -> None:
    keep()
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert find_measured(KEY) == {}
    keep()
    assert find_measured(KEY) == VALUES


@pytest.mark.parametrize(("days_ago", "is_found"), [(3, True), (4, False), (-1, False)])
def test_what_was_measured_days_ago_is_measured_anew(
    days_ago: int, is_found: bool, path: Path
) -> None:
    keep()
    path.write_text(path.read_text().replace(dated(0), dated(days_ago)))
    assert bool(find_measured(KEY)) == is_found
    keep({"rows": 2})
    assert len(json.loads(path.read_text())["entries"]) == 1 + is_found


def test_the_file_stays_small(path: Path) -> None:
    keep_measured(({"rows": rows}, VALUES) for rows in range(200))
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
        keep()
        monkeypatch.setattr(os, "replace", _disk_full)
    for _ in range(2):
        keep(values={"0": 3})
    assert find_measured(KEY) == (VALUES if fault == "disk full" else {})
    (record,) = caplog.records
    assert "can't be kept for the next process" in record.message
    if fault == "disk full":
        assert {each.name for each in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}


def _disk_full(*_names: object) -> None:
    raise OSError(28, "No space left on device")

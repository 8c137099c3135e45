"""Values are found under their own key and no other, and a damaged file is none."""

import json
import os
import subprocess
import sys

import pytest

from selfspec.machine import measured
from selfspec.machine.measured import Measured

KEY = {"model": "llama 135M", "device": "a card", "batch": 1, "versions": "torch 2.9"}
VALUES = {"widths": [1, 8, 64], "seconds": [0.01, 0.012, 0.03]}
OTHERS = {"widths": [1], "seconds": [1.0]}

KEEP = """
import sys
from pathlib import Path
from selfspec.machine.measured import Measured
costs, seconds = Measured("costs", Path(sys.argv[1])), float(sys.argv[2])
values = {"seconds": [seconds] * 400}
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    costs.keep({"model": "one"}, values)
"""


def kept_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_curve_is_found_again_under_its_key(tmp_path):
    Measured("costs", tmp_path).keep(KEY, VALUES)
    found = Measured("costs", tmp_path).find(dict(reversed(KEY.items())))
    assert found == VALUES
    Measured("costs", tmp_path).keep(KEY, OTHERS)
    assert Measured("costs", tmp_path).find(KEY) == OTHERS
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "change", [{"batch": 2}, {"batch": "1"}, {"device": "another"}, {"more": 1}], ids=str
)
def test_another_key_finds_nothing(tmp_path, change):
    Measured("costs", tmp_path).keep(KEY, VALUES)
    assert Measured("costs", tmp_path).find({**KEY, **change}) is None
    assert Measured("costs", tmp_path).find({}) is None


def test_a_hash_that_collides_is_a_miss(tmp_path, monkeypatch):
    costs = Measured("costs", tmp_path)
    monkeypatch.setattr(costs, "_path", lambda _key: tmp_path / "one.json")
    costs.keep(KEY, VALUES)
    assert costs.find(KEY) is not None
    assert costs.find({**KEY, "batch": 2}) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", "{}", "[" * 100_000, '{"format": 1}', "\udcff"],
    ids=range(9),
)
def test_a_damaged_file_is_none_and_is_replaced(tmp_path, text):
    costs = Measured("costs", tmp_path)
    costs.keep(KEY, VALUES)
    kept_file(tmp_path).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert costs.find(KEY) is None
    costs.keep(KEY, VALUES)
    assert costs.find(KEY) is not None


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_file_cut_off_is_none(tmp_path, share):
    Measured("costs", tmp_path).keep(KEY, VALUES)
    path = kept_file(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert Measured("costs", tmp_path).find(KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"key": {}},
        {"key": []},
        {"key": None},
    ],
    ids=str,
)
def test_a_foreign_or_newer_file_is_none(tmp_path, change):
    Measured("costs", tmp_path).keep(KEY, VALUES)
    path = kept_file(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert Measured("costs", tmp_path).find(KEY) is None


def test_a_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("a file where a folder should be")
    costs = Measured("costs", tmp_path / "file")
    costs.keep(KEY, VALUES)
    assert costs.find(KEY) is None


def test_a_write_that_fails_leaves_the_earlier_curve(tmp_path, monkeypatch):
    costs = Measured("costs", tmp_path)
    costs.keep(KEY, VALUES)

    def fail(*_names):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    costs.keep(KEY, OTHERS)
    assert costs.find(KEY) == VALUES
    assert len(list(tmp_path.iterdir())) == 1


def test_by_default_it_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Measured("costs").keep(KEY, VALUES)
    assert kept_file(tmp_path / "selfspec" / "costs").suffix == ".json"
    assert Measured("costs").find(KEY) is not None


def test_without_a_home_it_knows_and_keeps_nothing(monkeypatch):
    monkeypatch.setattr(measured, "user_folder", lambda: None)
    Measured("costs").keep(KEY, VALUES)
    assert Measured("costs").find(KEY) is None


def test_two_processes_write_the_same_key(tmp_path):
    """Whenever it is read, it is one of their curves, whole."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", KEEP, str(tmp_path), seconds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seconds in ("0.25", "0.5")
    ]
    Measured("costs", tmp_path).keep({"model": "one"}, {"seconds": [0.25] * 400})
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        assert Measured("costs", tmp_path).find({"model": "one"})["seconds"] in (
            [0.25] * 400,
            [0.5] * 400,
        )
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(list(tmp_path.iterdir())) == 1

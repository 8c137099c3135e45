"""A curve is found under its own key and no other, and a damaged file is none."""

import json
import os
import subprocess
import sys

import pytest

from selfspec import book
from selfspec.cost import CostBook, CostCurve

KEY = {"model": "llama 135M", "device": "a card", "batch": 1, "versions": "torch 2.9"}
CURVE = CostCurve({1: 0.01, 8: 0.012, 64: 0.03})

KEEP = """
import sys
from pathlib import Path
from selfspec.cost import CostBook, CostCurve
book, seconds = CostBook(Path(sys.argv[1])), float(sys.argv[2])
curve = CostCurve({width: seconds for width in range(1, 400)})
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    book.keep({"model": "one"}, curve)
"""


def kept_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_curve_is_found_again_under_its_key(tmp_path):
    CostBook(tmp_path).keep(KEY, CURVE)
    found = CostBook(tmp_path).find(dict(reversed(KEY.items())))
    assert found.as_dict() == CURVE.as_dict()
    CostBook(tmp_path).keep(KEY, CostCurve({1: 1.0}))
    assert CostBook(tmp_path).find(KEY).widths == (1,)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "change", [{"batch": 2}, {"batch": "1"}, {"device": "another"}, {"more": 1}], ids=str
)
def test_another_key_finds_nothing(tmp_path, change):
    CostBook(tmp_path).keep(KEY, CURVE)
    assert CostBook(tmp_path).find({**KEY, **change}) is None
    assert CostBook(tmp_path).find({}) is None


def test_a_hash_that_collides_is_a_miss(tmp_path, monkeypatch):
    costs = CostBook(tmp_path)
    monkeypatch.setattr(costs._book, "_path", lambda _key: tmp_path / "one.json")
    costs.keep(KEY, CURVE)
    assert costs.find(KEY) is not None
    assert costs.find({**KEY, "batch": 2}) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", "{}", "[" * 100_000, '{"format": 1}', "\udcff"],
    ids=range(9),
)
def test_a_damaged_file_is_none_and_is_replaced(tmp_path, text):
    costs = CostBook(tmp_path)
    costs.keep(KEY, CURVE)
    kept_file(tmp_path).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert costs.find(KEY) is None
    costs.keep(KEY, CURVE)
    assert costs.find(KEY) is not None


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_file_cut_off_is_none(tmp_path, share):
    CostBook(tmp_path).keep(KEY, CURVE)
    path = kept_file(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert CostBook(tmp_path).find(KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"key": {}},
        {"key": []},
        {"key": None},
        {"values": None},
        {"values": []},
        {"values": {"widths": [1], "seconds": [-1]}},
        {"values": {"widths": [1, 10**12], "seconds": [1, 1]}},
    ],
    ids=str,
)
def test_a_foreign_or_newer_file_is_none(tmp_path, change):
    CostBook(tmp_path).keep(KEY, CURVE)
    path = kept_file(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert CostBook(tmp_path).find(KEY) is None


def test_a_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("a file where a folder should be")
    costs = CostBook(tmp_path / "file")
    costs.keep(KEY, CURVE)
    assert costs.find(KEY) is None


def test_a_write_that_fails_leaves_the_earlier_curve(tmp_path, monkeypatch):
    costs = CostBook(tmp_path)
    costs.keep(KEY, CURVE)

    def fail(*_names):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    costs.keep(KEY, CostCurve({1: 1.0}))
    assert costs.find(KEY).as_dict() == CURVE.as_dict()
    assert len(list(tmp_path.iterdir())) == 1


def test_by_default_it_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    CostBook().keep(KEY, CURVE)
    assert kept_file(tmp_path / "selfspec" / "costs").suffix == ".json"
    assert CostBook().find(KEY) is not None


def test_without_a_home_it_knows_and_keeps_nothing(monkeypatch):
    monkeypatch.setattr(book, "user_folder", lambda: None)
    CostBook().keep(KEY, CURVE)
    assert CostBook().find(KEY) is None


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
    CostBook(tmp_path).keep({"model": "one"}, CostCurve({1: 0.25}))
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        assert CostBook(tmp_path).find({"model": "one"}).seconds(1) in (0.25, 0.5)
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(list(tmp_path.iterdir())) == 1

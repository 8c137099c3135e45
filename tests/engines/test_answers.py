"""What is written down of rows of an engine."""

from __future__ import annotations

import numpy as np
import pytest

from selfspec.engines import answers
from selfspec.engines.answers import Answers


def append(written: Answers, serials: list[int], tokens: list[int]) -> None:
    text = [[7, 8, token] for token in tokens]
    written.append(np.array(serials), np.array(text))


def test_what_was_kept_comes_first():
    written, again = Answers(), Answers()
    assert written.arrays() == {}
    append(written, [1, 1], [5, 6])
    again.restore(written.arrays())
    append(again, [1], [9])
    assert again.arrays()["tokens"].tolist() == [5, 6, -1, 9, -1]


def test_what_is_new_is_taken_once():
    written = Answers()
    append(written, [1], [5])
    assert written.taken().tolist() == [[7, 8, 5]]
    append(written, [1], [6])
    assert written.taken().tolist() == [[7, 8, 6]]
    assert len(written.taken()) == 0


def test_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answers, "_MAX_TOKENS", 4)
    written = Answers()
    for token in range(9):
        append(written, [1], [token])
    assert written.arrays()["tokens"].tolist() == [5, 6, 7, 8, -1]
    assert written.taken()[:, 2].tolist() == [5, 6, 7, 8]

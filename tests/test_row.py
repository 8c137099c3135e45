"""Rows end where their rules say, and a streamer gets each token once, as soon as all have it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.row import Row, Stops, output_of, stream_to
from tests.lossless.test_same_streamers import Recorder
from tests.oracles import padded

PAD, EOS, FAR = 0, 9, 10_000
ENDS = Stops(frozenset({8, EOS}))


def rows_of(prompts: list[list[int]], recorder: Recorder | None = None, **rules):
    rules = {"max_length": FAR, "stops": ENDS, "drafter": None} | rules
    rows = [Row(prompt=torch.tensor([ids]), prompt_ids=ids, **rules) for ids in prompts]
    if recorder is not None:
        stream_to(recorder, rows)
    return rows


def test_a_row_ends_with_any_of_the_end_tokens():
    first, second = rows = rows_of([[1, 2], [3, 4]])
    assert (first.last_token, rows_of([[]])[0].last_token) == (2, 0)
    assert not first.commit(5)
    assert first.commit(8)
    assert second.commit(EOS)
    assert [row.is_done for row in rows] == [True, True]
    assert [row.num_new for row in rows] == [2, 1]
    assert output_of(rows).tolist() == [[1, 2, 5, 8], [3, 4, EOS, PAD]]


@st.composite
def races(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """What each row writes, its end token included, and which row moves when."""
    ordinary = st.lists(st.integers(1, 7), max_size=6)
    rows = draw(st.lists(ordinary.map(lambda row: [*row, EOS]), min_size=1, max_size=4))
    return rows, draw(st.permutations([i for i, row in enumerate(rows) for _ in row]))


@settings(deadline=None)
@given(races())
def test_the_streaming_front_is_what_all_rows_have_reached(race):
    """Each token once, in order, as soon as it is there; rows that ended show the pad."""
    texts, order = race
    recorder = Recorder()
    rows = rows_of([[4, 4]] * len(texts), recorder)
    written: list[list[int]] = [[] for _ in texts]
    for row in order:
        token = texts[row][len(written[row])]
        written[row].append(token)
        assert rows[row].commit(token) == (token == EOS)
        running = [len(w) for w in written if EOS not in w]
        front = min(running) if running else max(map(len, written))
        expected = [list(column) for column in zip(*padded(written, PAD), strict=True)]
        told = [each[-1] for each in recorder.told if each != "end"]
        assert told == expected[:front]
    assert output_of(rows)[:, 2:].tolist() == padded(texts, PAD)


@given(st.lists(st.integers(1, 5), max_size=8))
def test_the_prefix_grows_with_the_text_however_seldom_it_is_read(parts):
    (row,), text = rows_of([[1, 2, 3]], stops=Stops()), [1, 2, 3]
    for part in parts:
        for token in range(part * part * part * 5):
            row.commit(100 + token)
            text.append(100 + token)
        assert row.prefix().tolist() == [text]


def test_the_output_is_a_copy_of_stocks_dtype():
    (row,) = rows_of([[1, 2]])
    row.prompt = row.prompt.int()
    row.commit(3)
    out = output_of([row])
    row.commit(4)
    assert out.tolist() == [[1, 2, 3]]
    assert out.dtype == row.prefix().dtype == torch.int64


@pytest.mark.parametrize("ends", ["by their rules", "by an error"])
def test_rows_that_were_streamed_are_freed_at_once(ends: str) -> None:
    """What they draft from knows the budget, and the budget knows keys and values."""
    (row,) = rows_of([[1, 2]], Recorder())
    row.commit(5)
    if ends == "by an error":
        row.fail(ValueError())
    else:
        row.commit(EOS)
    freed = weakref.ref(row)
    gc.disable()
    try:
        del row
        assert freed() is None
    finally:
        gc.enable()

"""Rows end where their rules say, and a streamer gets each token once, as soon as all have it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.verify.transcript import RowStops, Transcript
from tests.oracles import padded

PAD, EOS, FAR = 0, 9, 10_000
ENDLESS = RowStops(FAR, frozenset({EOS}))


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        assert value.device.type == "cpu"
        self.columns.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def transcript(prompts: list[list[int]], streamer: Recorder | None = None, room: int = 256):
    return Transcript(
        torch.tensor(prompts), pad_token_id=PAD, max_length=FAR, streamer=streamer, room=room
    )


def test_a_row_ends_with_any_of_the_end_tokens():
    text = transcript([[1, 2], [3, 4]])
    stops = RowStops(FAR, frozenset({8, EOS}))
    assert not text.commit(0, 5, stops)
    assert text.commit(0, 8, stops)
    assert text.commit(1, EOS, stops)
    assert text.done == [True, True]
    assert text.all_done
    assert (text.num_new(0), text.num_new(1)) == (2, 1)
    assert text.sequences().tolist() == [[1, 2, 5, 8], [3, 4, EOS, PAD]]


def test_a_row_ends_at_the_longest_length():
    text = transcript([[1, 2]])
    stops = RowStops(4)
    assert not text.commit(0, EOS, stops)
    assert text.commit(0, 5, stops)
    assert text.prefix(0).tolist() == [[1, 2, EOS, 5]]


def test_criteria_see_the_row_with_its_newest_token():
    seen = []

    def criterion(ids: torch.Tensor, scores: None) -> torch.Tensor:
        assert scores is None
        seen.append(ids.tolist())
        return ids[:, -1] == 7

    text = transcript([[1], [2]])
    stops = RowStops(FAR, frozenset(), [criterion])
    assert [text.commit(1, 6, stops), text.commit(1, 7, stops)] == [False, True]
    assert seen == [[[2, 6]], [[2, 6, 7]]]
    assert not text.all_done


def test_moving_together_is_stocks_loop():
    recorder = Recorder()
    text = transcript([[1, 1], [2, 2]], recorder)
    told = []

    def criteria(ids: torch.Tensor, scores: object) -> torch.Tensor:
        told.append((ids.tolist(), scores))
        return (ids[:, -1] == EOS) | (ids.shape[1] >= 5)

    text.commit_all(torch.tensor([EOS, 4]), criteria, scores="first")
    assert text.done == [True, False]
    text.commit_all(torch.tensor([PAD, 5]), criteria, None)
    assert text.done == [True, False]  # once stopped, always stopped
    assert text.prefixes().tolist() == [[1, 1, EOS, PAD], [2, 2, 4, 5]]
    text.commit_all(torch.tensor([PAD, 6]), criteria, None)
    assert text.all_done
    assert told[0] == ([[1, 1, EOS], [2, 2, 4]], "first")
    assert recorder.columns == [[EOS, 4], [PAD, 5], [PAD, 6]]
    assert text.sequences().tolist() == [[1, 1, EOS, PAD, PAD], [2, 2, 4, 5, 6]]


def test_without_a_pad_token_rows_are_filled_with_zeros():
    text = Transcript(torch.tensor([[1], [2]]), pad_token_id=None, max_length=FAR)
    text.commit(0, EOS, ENDLESS)
    text.commit(1, 3, ENDLESS)
    text.commit(1, EOS, ENDLESS)
    assert text.sequences().tolist() == [[1, EOS, 0], [2, 3, EOS]]


@st.composite
def races(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """What each row writes, its end token included, and which row moves when."""
    ordinary = st.lists(st.integers(1, EOS - 1), max_size=6)
    rows = draw(st.lists(ordinary.map(lambda row: [*row, EOS]), min_size=1, max_size=4))
    return rows, draw(st.permutations([i for i, row in enumerate(rows) for _ in row]))


@settings(deadline=None)
@given(races(), st.integers(0, 3))
def test_the_streaming_front_is_what_all_rows_have_reached(race, room):
    """Each token once, in order, as soon as it is there; rows that ended show the pad."""
    rows, order = race
    recorder = Recorder()
    text = transcript([[4, 4]] * len(rows), recorder, room)
    written: list[list[int]] = [[] for _ in rows]
    for row in order:
        token = rows[row][len(written[row])]
        written[row].append(token)
        assert text.commit(row, token, ENDLESS) == (token == EOS)
        running = [len(w) for w in written if EOS not in w]
        front = min(running) if running else max(map(len, written))
        expected = [list(column) for column in zip(*padded(written, PAD), strict=True)]
        assert recorder.columns == expected[:front]
    assert text.sequences()[:, 2:].tolist() == padded(rows, PAD)
    assert [list(c) for c in zip(*padded(rows, PAD), strict=True)] == recorder.columns
    assert not recorder.ended
    text.end()
    assert recorder.ended


@pytest.mark.parametrize("room", [0, 1, 7])
def test_growth_beyond_the_room_keeps_every_row(room):
    text = transcript([[1, 2, 3], [4, 5, 6]], room=room)
    for token in range(50):
        text.commit(0, 100 + token, ENDLESS)
        if token % 2:
            text.commit(1, 200 + token, ENDLESS)
    assert text.prefix(0).tolist() == [[1, 2, 3, *range(100, 150)]]
    assert text.prefix(1).tolist() == [[4, 5, 6, *range(201, 250, 2)]]


def test_sequences_are_a_copy_of_stocks_dtype():
    prompt = torch.tensor([[1, 2]], dtype=torch.int32)
    text = Transcript(prompt, pad_token_id=PAD, max_length=FAR)
    text.commit(0, 3, ENDLESS)
    out = text.sequences()
    text.commit(0, 4, ENDLESS)
    assert out.tolist() == [[1, 2, 3]]
    assert out.dtype == torch.int64

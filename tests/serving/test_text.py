"""Text as it may be sent: whole characters, and nothing of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from selfspec.serving.text import TextStream


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@given(text=st.text(alphabet="aé語😀\ufffd b"), cuts=st.lists(st.integers(0, 40)))
def test_pieces_are_the_text_whatever_the_cuts(text: str, cuts: list[int]) -> None:
    ids, stream = list(text.encode()), TextStream(decode)
    ends = [*sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    pieces = [stream.add(ids[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    assert "".join([*pieces, stream.end()]) == text


@given(text=st.binary(max_size=12))
def test_bytes_that_are_no_text_are_there_at_the_end(text: bytes) -> None:
    stream = TextStream(decode)
    pieces = [stream.add([byte]) for byte in text]
    assert "".join([*pieces, stream.end()]) == decode(list(text))


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    stream = TextStream(decode, stops)
    pieces = []
    for letter in text.encode():
        if stream.is_stopped:
            break
        pieces.append(stream.add([letter]))
        sent = "".join(pieces)
        assert not any(stop in sent for stop in stops)
    found = [text.find(stop) for stop in stops if stop in text]
    assert stream.is_stopped == bool(found)
    # A stop string that is complete ends the text, even if a longer one began before it.
    told = "".join([*pieces, stream.end()])
    assert text.startswith(told)
    if not found:
        assert told == text

"""Text that comes in pieces, broken between words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.cli.chat.wrapping import WordWrap


def wrapped(pieces, width=10):
    parts = []
    wrap = WordWrap(lambda text, origin: parts.append((text, origin)), lambda: width)
    for number, piece in enumerate(pieces):
        wrap.add(piece, str(number))
    wrap.end()
    return parts


def text_of(parts):
    return "".join(text for text, _ in parts)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("1234567890 12", ["1234567890", "12"]),
        ("123456 7890", ["123456", "7890"]),
        ("a\n\n  b c", ["a", "", "  b c"]),
        ("supercalifragilistic x yz", ["supercalifragilistic", "x yz"]),
        ("你好世界你好世界", ["你好世界你", "好世界"]),
        ("a  \nb", ["a", "b"]),
        ("x\tyzyz", ["x", "yzyz"]),
    ],
)
def test_lines_end_between_words(text, lines):
    assert text_of(wrapped([text])).split("\n") == lines
    assert text_of(wrapped(text)).split("\n") == lines


@given(st.lists(st.text("ab 語\n", max_size=8)), st.integers(2, 12))
def test_only_white_space_changes(pieces, width):
    text = "".join(pieces)
    assert text_of(wrapped(pieces, width)).split() == text.split() or "語" in text
    assert "".join(text_of(wrapped(pieces, width)).split()) == "".join(text.split())


def test_every_part_keeps_its_origin():
    assert wrapped(["one t", "wo"]) == [("one", "0"), (" ", "0"), ("t", "0"), ("wo", "1")]

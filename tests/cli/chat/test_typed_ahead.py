"""What is pasted while a chat answers: not shown, and not lost."""

from __future__ import annotations

import os
import sys

import pytest

from selfspec.cli.chat.typed_ahead import TypedAhead

pty = pytest.importorskip("pty", reason="Windows has no terminals of this kind")


@pytest.fixture
def keyboard(monkeypatch):
    """The end of a terminal at which keys come in, with its screen."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours
    os.close(ours)


@pytest.mark.parametrize(
    ("pasted", "kept"),
    [
        ("two\rlines\r", "two\nlines\n"),
        ("grüße", "grüße"),
        ("\x1b[200~def f():\r\treturn\x1b[201~", "def f():\n\treturn"),
        ("\x1b[A\x1bOP\x04\x7f", ""),
        ("y" * 3000 + "z" * 3000, "y" * 3000 + "z" * 3000),  # more than the system keeps in a line
    ],
)
def test_it_is_kept_for_the_next_question(keyboard, pasted, kept):
    typed = TypedAhead()
    with typed.kept():
        os.write(keyboard, pasted.encode())
    assert typed.take() == kept
    assert typed.take() == ""
    os.write(keyboard, b"x")
    assert os.read(keyboard, 1) == b"x"  # This is the first character that the screen shows.

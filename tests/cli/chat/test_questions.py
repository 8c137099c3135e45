"""Questions typed or pasted at a terminal, and lines from a pipe."""

import io
import os
import sys
from contextlib import nullcontext

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from selfspec.cli.chat import questions
from selfspec.cli.chat.questions import question_reader, silent_terminal, typed_ahead

UP = "\x1b[A"


@pytest.fixture
def typed(monkeypatch):
    """The questions that come of what is typed at a terminal."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    monkeypatch.setattr(questions, "silent_terminal", nullcontext)
    monkeypatch.setattr(questions, "typed_ahead", str)

    def typed_questions(*keys: str) -> list[str]:
        with (
            create_pipe_input() as terminal,
            create_app_session(input=terminal, output=DummyOutput()),
            question_reader(pytest.fail) as read,
        ):
            found = []
            for text in keys:
                terminal.send_text(text)
                found.append(read())
            return found

    return typed_questions


def test_enter_sends(typed):
    assert typed("hello\r", "again\r") == ["hello", "again"]


@pytest.mark.parametrize("keys", ["\x1b\r", "\n"], ids=["Alt-Enter", "Ctrl-J"])
def test_other_keys_add_a_line(typed, keys):
    assert typed(f"one{keys}two\r") == ["one\ntwo"]


def test_a_paste_of_several_lines_is_one_question(typed):
    assert typed("\x1b[200~one\rtwo\r\nthree\x1b[201~!\r") == ["one\ntwo\nthree!"]


def test_the_up_key_brings_back_a_question(typed):
    assert typed("first\r", f"{UP}!\r") == ["first", "first!"]


def test_ctrl_c_and_ctrl_d_are_told_apart(typed):
    with pytest.raises(KeyboardInterrupt):
        typed("half a line\x03")
    with pytest.raises(EOFError):
        typed("\x04")


def test_a_pipe_gives_its_lines_and_echoes_them(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo"))
    echoed = []
    with question_reader(echoed.append) as read:
        assert [read(), read()] == ["one\n", "two"]
        assert echoed == ["> one\n", "> two\n"]
        with pytest.raises(EOFError):
            read()


@pytest.fixture
def keyboard(monkeypatch):
    """The end of a terminal at which keys come in, with its screen."""
    pytest.importorskip("pty", reason="Windows has no terminals of this kind")
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
def test_what_is_typed_during_an_answer_is_kept_and_not_shown(keyboard, pasted, kept):
    with silent_terminal():
        os.write(keyboard, pasted.encode())
        assert typed_ahead() == kept
        assert typed_ahead() == ""
    os.write(keyboard, b"x")
    assert os.read(keyboard, 1) == b"x"  # This is the first character that the screen shows.


def test_enter_just_before_a_prompt_is_no_new_line(keyboard):
    """A prompt tells it from Ctrl-J by its code, which an ordinary terminal changes."""
    with silent_terminal():
        os.write(keyboard, b"why?\r")
        assert os.read(sys.stdin.fileno(), 9) == b"why?\r"

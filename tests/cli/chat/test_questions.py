"""Questions typed or pasted at a terminal, and lines from a pipe."""

import io
import sys

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from selfspec.cli.chat.questions import question_reader

UP = "\x1b[A"


@pytest.fixture
def typed(monkeypatch):
    """The questions that come of what is typed at a terminal."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    def questions(*keys: str) -> list[str]:
        with (
            create_pipe_input() as terminal,
            create_app_session(input=terminal, output=DummyOutput()),
        ):
            read = question_reader(pytest.fail)
            found = []
            for text in keys:
                terminal.send_text(text)
                found.append(read())
            return found

    return questions


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
    read = question_reader(echoed.append)
    assert [read(), read()] == ["one\n", "two"]
    assert echoed == ["> one\n", "> two\n"]
    with pytest.raises(EOFError):
        read()

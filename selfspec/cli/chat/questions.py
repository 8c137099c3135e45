"""Reads a chat's questions: edited at a terminal, or line by line from a pipe."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "> "
# Keys that write no text, such as the arrows, and the marks around a pasted text.
_NO_TEXT = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.)?|[^\n\t\x20-\U0010ffff]|\x7f")
_PAUSE = 0.05  # In seconds. A long text that is pasted comes in pieces, one soon after the other.


@contextmanager
def question_reader(echo: Callable[[str], object]) -> Iterator[Callable[[], str]]:
    """Inside, each call gives the next question, or raises `EOFError` after the last one.

    At a terminal Enter sends, Alt-Enter or Ctrl-J adds a line, a pasted text is one question
    however many lines it has, and the up key brings back earlier questions. What is typed during
    an answer is not shown, and becomes the start of the next question. From a pipe each line is a
    question; `echo` gets it with the prompt in front, so that the output reads like a chat.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield lambda: _line(echo)
        return
    session = _session()
    with silent_terminal():
        yield lambda: session.prompt(default=typed_ahead())


@contextmanager
def silent_terminal() -> Iterator[None]:
    """Inside, the terminal shows nothing of what is typed, but in a prompt; Ctrl-C works as always.

    It also keeps Enter apart from Ctrl-J, so that Enter sends even a moment before a prompt.
    """
    try:
        import termios
    except ImportError:  # Windows shows nothing unasked, and keeps what is typed by itself.
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = list(before)
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def typed_ahead() -> str:
    """What was typed or pasted at a silent terminal since the last prompt."""
    parts: list[bytes] = []
    if os.name != "nt":
        terminal = sys.stdin.fileno()
        while select.select([terminal], [], [], _PAUSE if parts else 0)[0]:
            part = os.read(terminal, 1 << 16)
            if not part:
                break
            parts.append(part)
    text = b"".join(parts).decode("utf-8", errors="ignore")
    return _NO_TEXT.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def _line(echo: Callable[[str], object]) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    echo(f"{PROMPT}{line.rstrip()}\n")
    return line


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _add_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        PROMPT,
        history=InMemoryHistory(),
        key_bindings=keys,
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
    )

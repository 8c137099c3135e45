"""Reads a chat's questions: edited at a terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

__all__ = ["PROMPT", "question_reader"]

PROMPT = "> "


def question_reader(echo: Callable[[str], object]) -> Callable[[], str]:
    """A function that returns the next question, and raises `EOFError` after the last one.

    At a terminal Enter sends, Alt-Enter or Ctrl-J adds a line, a pasted text is one question
    however many lines it has, and the up key brings back earlier questions. From a pipe each line
    is a question; `echo` gets it with the prompt in front, so that the output reads like a chat.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _terminal_reader()
    return lambda: _next_line(echo)


def _next_line(echo: Callable[[str], object]) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    echo(f"{PROMPT}{line.rstrip()}\n")
    return line


def _terminal_reader() -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory

    session: PromptSession[str] = PromptSession(
        PROMPT,
        history=InMemoryHistory(),
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
    )
    return session.prompt


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _add_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys

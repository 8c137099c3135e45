"""Reads a chat's questions: edited at a terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from selfspec.cli.chat.typed_ahead import TypedAhead

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "


def question_reader(echo: Callable[[str], object]) -> _Terminal | _Pipe:
    """Called, it gives the next question; raises `EOFError` after the last one.

    At a terminal Enter sends, Alt-Enter or Ctrl-J adds a line, a pasted text is one question
    however many lines it has, and the up key brings back earlier questions. From a pipe each line
    is a question; `echo` gets it with the prompt in front, so that the output reads like a chat.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _Terminal()
    return _Pipe(echo)


class _Pipe:
    def __init__(self, echo: Callable[[str], object]) -> None:
        self._echo = echo

    def __call__(self) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        self._echo(f"{PROMPT}{line.rstrip()}\n")
        return line

    def kept(self) -> AbstractContextManager[None]:
        """What is not read yet waits in the pipe."""
        return nullcontext()


class _Terminal:
    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory

        self._typed_ahead = TypedAhead()
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            history=InMemoryHistory(),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=" " * len(PROMPT),
        )

    def __call__(self) -> str:
        return self._session.prompt(default=self._typed_ahead.take())

    def kept(self) -> AbstractContextManager[None]:
        """Inside, what is typed is not shown, and becomes the start of the next question."""
        return self._typed_ahead.kept()


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

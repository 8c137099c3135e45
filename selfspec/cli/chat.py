"""`selfspec chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from selfspec.cli.conversation import Answer, Conversation
from selfspec.cli.errors import CliError
from selfspec.cli.live import OWN
from selfspec.cli.paint import Painter
from selfspec.cli.writer import Writer
from selfspec.config import SpecConfig
from selfspec.errors import unknown_name

__all__ = ["Chat"]

_PROMPT = "> "
_COMMANDS = {
    "/stats": "tokens per step and where they came from, over all answers",
    "/reset": "forget the conversation; what was learned for drafting stays",
    "/help": "this list",
    "/exit": "leave; so does Ctrl-D. Ctrl-C stops an answer",
}


class Chat:
    """Reads questions until the user leaves."""

    def __init__(
        self,
        writer: Writer,
        config: SpecConfig,
        *,
        system: str | None = None,
        show_drafts: bool = False,
    ) -> None:
        self._console = Console(highlight=False)
        self._painter = Painter(self._console)
        self._show_drafts = show_drafts
        self._writer = writer
        self._spec = writer.new_spec(config)
        self._last: Answer | None = None
        self.conversation = Conversation(writer, self._spec, self._show, system=system)

    def run(self) -> None:
        """Until Ctrl-D, the end of stdin, or `/exit`."""
        self._introduce()
        while True:
            try:
                line = self._read_line().strip()
                if line == "/exit":
                    return
                if line:
                    self._handle(line)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._note("\n(Ctrl-D or /exit leaves)")

    def _introduce(self) -> None:
        self._note(f"{self._writer.loaded}, {self._writer}. /help lists commands.")
        if self._show_drafts and self._painter.in_colour:
            self._console.print(self._painter.legend(self._writer.origins(self._spec.config)))

    def _read_line(self) -> str:
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` line editing, where there is one
            return input(_PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        self._painter.show(f"{_PROMPT}{line.rstrip()}\n")  # so that a piped chat reads like one
        return line

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            self._obey(line)
            return
        try:
            self._last = self.conversation.ask(line)
        except CliError as error:
            self._note(f"error: {error}")
            return
        self._console.print()
        self._note(self._ending(self._last))

    def _obey(self, command: str) -> None:
        if command == "/stats":
            self._note(self._stats())
        elif command == "/reset":
            self.conversation.reset()
            self._note("The conversation starts over.")
        elif command == "/help":
            self._note("\n".join(f"{name:<7} {what}" for name, what in _COMMANDS.items()))
        else:
            self._note(f"error: {unknown_name('command', command, _COMMANDS)}")

    def _stats(self) -> str:
        if self._last is None:
            return "No answer yet."
        reused, length = self._last.num_reused, self._last.num_prompt_tokens
        return f"{self._spec.total_stats}\n  {reused} of the last {length} prompt tokens reused"

    def _ending(self, answer: Answer) -> str:
        """What is worth a line below an answer."""
        stats = self._spec.stats
        if answer.interrupted:
            return "(stopped; the conversation goes on from here)"
        parts = [f"{stats.num_new_tokens} tokens", f"{stats.tokens_per_step:.2f} a step"]
        if stats.disabled_reason:
            parts.append(f"not drafted as asked: {stats.disabled_reason}")
        if answer.cut_at is not None:
            parts.append(f"cut at {answer.cut_at}")
        return f"({', '.join(parts)})"

    def _show(self, piece: str, origin: str) -> None:
        self._painter.show(piece, origin if self._show_drafts else OWN)

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

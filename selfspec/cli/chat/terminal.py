"""What a chat shows in the terminal: questions, answers as they come, commands, and its end."""

from __future__ import annotations

from contextlib import ExitStack

from rich.console import Console
from rich.text import Text

from selfspec.cli.chat.conversation import Answer, Conversation
from selfspec.cli.chat.questions import question_reader
from selfspec.cli.chat.wrapping import WordWrap
from selfspec.cli.shared.live_text import OWN
from selfspec.cli.shared.messages import working
from selfspec.cli.shared.paint import Painter
from selfspec.cli.shared.writer import Writer
from selfspec.config import SpecConfig
from selfspec.errors import SelfSpecError, unknown_name

_COMMANDS = {
    "/stats": "tokens per step and where they came from, over all answers",
    "/reset": "forget the conversation; what was learned for drafting stays",
    "/help": "this list",
    "/exit": "leave; so does Ctrl-D. Ctrl-C stops an answer",
}
_KEYS = "Enter sends, Alt-Enter or Ctrl-J adds a line, the up key brings back a question."


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
        self._wrap = WordWrap(self._painter.show, lambda: self._console.width)
        self._spinner = ExitStack()
        self._show_drafts = show_drafts
        self._writer = writer
        self._spec = writer.new_spec(config)
        self._last: Answer | None = None
        self.conversation = Conversation(writer, self._spec, self._show, system=system)

    def run(self) -> None:
        """Answers until Ctrl-D, the end of stdin, or `/exit`."""
        self._introduce()
        with question_reader(self._painter.show) as read:
            while True:
                try:
                    line = read().strip()
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

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            self._obey(line)
            return
        try:
            with self._spinner:
                self._spinner.enter_context(working("Reading", only_spinner=True))
                self._last = self.conversation.ask(line)
        except SelfSpecError as error:
            self._note(f"error: {error}")
            return
        self._wrap.end()
        self._console.print()
        self._note(self._ending(self._last))

    def _obey(self, command: str) -> None:
        if command == "/stats":
            self._note(self._stats())
        elif command == "/reset":
            self.conversation.reset()
            self._note("The conversation starts over.")
        elif command == "/help":
            commands = [f"{name:<7} {what}" for name, what in _COMMANDS.items()]
            self._note("\n".join([*commands, _KEYS]))
        else:
            self._note(f"error: {unknown_name('command', command, _COMMANDS)}")

    def _stats(self) -> str:
        if self._last is None:
            return "No answer yet."
        reused, length = self._last.num_reused, self._last.num_prompt_tokens
        return f"{self._spec.total_stats}\n  {reused} of the last {length} prompt tokens reused"

    def _ending(self, answer: Answer) -> str:
        """The line below an answer: how long it is, and what did not go as usual."""
        stats = self._spec.stats
        if answer.interrupted:
            return "(stopped; the conversation goes on from here)"
        parts = [f"{stats.num_new_tokens} tokens", f"{stats.tokens_per_step:.2f} a step"]
        if answer.cut_at is not None:
            parts.append(f"cut at {answer.cut_at}")
        return f"({', '.join(parts)})"

    def _show(self, piece: str, origin: str) -> None:
        """A piece of an answer; a terminal gets whole words, a pipe the text as it is."""
        self._spinner.close()
        show = self._wrap.add if self._console.is_terminal else self._painter.show
        show(piece, origin if self._show_drafts else OWN)

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

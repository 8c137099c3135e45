"""`selfspec chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from selfspec.cli.loading import check_options
from selfspec.cli.messages import paint, working
from selfspec.cli.options import Knobs, Model, WriteOptions
from selfspec.cli.writer import Writer, load_writer
from selfspec.errors import CliError, SelfSpecError, unknown_name
from selfspec.serving.settings import Settings

if TYPE_CHECKING:
    from selfspec import SelfSpec, SpecConfig

_PROMPT = "> "
_COMMANDS = {
    "/stats": "tokens per step and where they came from, over all answers",
    "/reset": "forget the conversation; what was learned for drafting stays",
    "/help": "this list",
    "/exit": "leave; so do /quit and Ctrl-D. Ctrl-C stops an answer",
}
_KEYS = "Enter sends, Alt-Enter adds a line, the up key brings back a question."


def chat(
    model: Model,
    /,
    *,
    system: str | None = None,
    options: WriteOptions = WriteOptions(),
    knobs: Knobs = Knobs(),
) -> None:
    """Talk with a chat model in the terminal.

    Args:
        system: A system message to begin with.
    """
    options, config = replace(options, model=model), knobs.config()
    check_options(options)
    writer = load_writer(options, chats=True, packs=config.forward != "eager")
    ChatLoop(writer, config, system).run(_reader())


class ChatLoop:
    def __init__(self, writer: Writer, config: SpecConfig, system: str | None = None) -> None:
        self._console = Console(highlight=False)
        self._spinner = ExitStack()
        self._writer = writer
        # The next turn does not read again what was said.
        self._spec = writer.new_spec(config, kept_kv="25%")
        self.conversation = Conversation(writer, self._spec, self._show, system=system)

    def run(self, read: Callable[[], str]) -> None:
        """Answers what is read until Ctrl-D, the end of stdin, `/exit` or `/quit`."""
        self._note(f"{self._writer}, {self._writer.sampling}. /help lists commands.")
        while True:
            try:
                line = read().strip()
                if line in ("/exit", "/quit"):
                    return
                if line:
                    self._handle(line)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._note("\n(Ctrl-D or /exit leaves)")
            except SelfSpecError as error:
                self._note(f"error: {error}")

    def _handle(self, line: str) -> None:
        if not line.startswith("/"):
            self._answer(line)
        elif line == "/reset":
            self.conversation.reset()
            self._note("The conversation starts over.")
        elif line == "/stats":
            self._note(str(self._spec.total_stats))
        elif line == "/help":
            commands = [f"{name:<7} {what}" for name, what in _COMMANDS.items()]
            self._note("\n".join([*commands, _KEYS]))
        else:
            self._note(f"error: {unknown_name('command', line.split()[0], _COMMANDS)}")

    def _answer(self, question: str) -> None:
        with self._spinner:
            self._spinner.enter_context(working("Reading", only_spinner=True))
            reason = self.conversation.ask(question)
        stats = self._spec.stats
        parts = [f"{stats.num_new_tokens} tokens", f"{stats.tokens_per_step:.2f} a step"]
        if stats.step_seconds:
            parts.append(f"{stats.num_new_tokens / stats.step_seconds:.1f} a second")
        if reason == "length":
            parts.append("cut off")
        if reason == "interrupted":
            parts = ["stopped; the conversation continues from here"]
        self._console.print()
        self._note(f"({', '.join(parts)})")

    def _show(self, piece: str) -> None:
        self._spinner.close()
        paint(self._console, piece)

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


class Conversation:
    """The messages so far. `show` gets each answer in pieces, as it comes."""

    def __init__(
        self,
        writer: Writer,
        spec: SelfSpec,
        show: Callable[[str], object],
        *,
        system: str | None = None,
    ) -> None:
        self._writer = writer
        self._translator = writer.translator()
        self._spec = spec
        self._show = show
        self._opening = [{"role": "system", "content": system}] if system else []
        self.reset()
        # Refuses a system message that the template does not take.
        self._translator.encoded([*self.messages, {"role": "user", "content": "?"}], Settings())

    def reset(self) -> None:
        """Starts over; what `spec` has learned stays."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> Literal["stop", "length", "interrupted"]:
        """Streams the answer and keeps it, up to Ctrl-C; returns why it ended."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._translator.encoded(messages, Settings())
        assert isinstance(ids, list)  # A chat has no images.
        limit = self._writer.max_positions or sys.maxsize
        most = min(self._writer.options.max_new_tokens, limit - len(ids))
        if most < 1:
            raise CliError(
                f"the conversation must leave room in the model's {limit} positions "
                f"(got {len(ids)} tokens); /reset starts over"
            )
        from selfspec.batch.text_stream import LiveText  # Imports torch.

        live = LiveText(self._writer.tokenizer, ids, self._show)
        reason: Literal["stop", "length", "interrupted"] = "interrupted"
        try:
            new_ids = self._writer.new_ids(ids, self._spec, streamer=live, max_new_tokens=most)
            reason = "length" if len(new_ids) == most else "stop"
        except KeyboardInterrupt:
            pass  # What was shown by then is kept.
        self.messages = [*messages, {"role": "assistant", "content": live.text}]
        return reason


def _reader() -> Callable[[], str]:
    """Each call gives the next question, or raises `EOFError` after the last one.

    A line from a pipe is one, and is printed too. A text that is pasted at a terminal is one.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        session: PromptSession[str] = PromptSession(
            _PROMPT, key_bindings=keys, prompt_continuation="  "
        )
        return session.prompt

    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # A line that is no UTF-8 ends no chat.

    def line() -> str:
        text = sys.stdin.readline()
        if not text:
            raise EOFError
        print(f"{_PROMPT}{text.rstrip()}")
        return text

    return line

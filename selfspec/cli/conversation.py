"""A conversation: its messages, and how a turn is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

from selfspec.batch.text_stream import LiveText
from selfspec.cli.writer import Writer
from selfspec.errors import CliError
from selfspec.plugin import SelfSpec
from selfspec.serving.settings import Settings


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
        live = LiveText(self._writer.tokenizer, ids, self._show)
        reason: Literal["stop", "length", "interrupted"] = "interrupted"
        try:
            new_ids = self._writer.new_ids(ids, self._spec, streamer=live, max_new_tokens=most)
            reason = "length" if len(new_ids) == most else "stop"
        except KeyboardInterrupt:
            pass  # What was shown by then is kept.
        self.messages = [*messages, {"role": "assistant", "content": live.text}]
        return reason

"""A conversation: its messages, and how a turn is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from selfspec.batch.prompts import encoded
from selfspec.batch.text_stream import LiveText
from selfspec.cli.writer import Writer
from selfspec.errors import CliError
from selfspec.plugin import SelfSpec


class Turn(NamedTuple):
    num_kept: int  # Tokens of the prompt that were not read again.
    interrupted: bool = False
    is_cut: bool = False  # Did it take all the tokens that it might have?


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
        self._spec = spec
        self._show = show
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Starts over with another system message; refuses one that the template does not take."""
        opening = [{"role": "system", "content": _whole(system)}] if system else []
        encoded([*opening, {"role": "user", "content": "?"}], self._writer.tokenizer)
        self._opening = opening
        self.reset()

    def reset(self) -> None:
        """Starts over; what `spec` has learned stays."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> Turn:
        """Streams the answer and keeps it. Ctrl-C ends it; what was shown by then is kept."""
        messages = [*self.messages, {"role": "user", "content": _whole(text)}]
        ids = encoded(messages, self._writer.tokenizer)
        budget = self._budget(len(ids))
        live = LiveText(self._writer.tokenizer, ids, self._show)
        interrupted, num_new = False, 0
        try:
            new_ids = self._writer.new_ids(ids, self._spec, streamer=live, max_new_tokens=budget)
            num_new = len(new_ids)
        except KeyboardInterrupt:
            interrupted = True
        turn = Turn(self._spec.stats.num_prompt_tokens_kept, interrupted, num_new == budget)
        self.messages = [*messages, {"role": "assistant", "content": live.text}]
        return turn

    def _budget(self, num_prompt_tokens: int) -> int:
        limit, most = self._writer.max_positions, self._writer.options.max_new_tokens
        if limit is None:
            return most
        if num_prompt_tokens >= limit:
            raise CliError(
                f"the conversation must leave room in the model's {limit} positions "
                f"(got {num_prompt_tokens} tokens); /reset starts over"
            )
        return min(most, limit - num_prompt_tokens)


def _whole(text: str) -> str:
    """Refuses what was no UTF-8; the command line and the chat have halves of characters there."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CliError(f"a message must be UTF-8 text (got {text[:40]!r})") from error
    return text

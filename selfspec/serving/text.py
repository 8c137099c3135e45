"""From tokens as they come to text that may be sent: whole characters, and no stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.batch.words import Words


class TextStream:
    """The text of one answer, which ends before the first stop string.

    Held back is the beginning of a character of several tokens, and whatever a stop string may
    begin with.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._words = Words(tokenizer)
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next tokens; returns what may be sent now."""
        return self._pass(self._words.add(*ids))

    def end(self) -> str:
        """What is left, when no token comes any more."""
        text = self._pass(self._words.rest())
        held, self._held = self._held, ""
        return text if self.is_stopped else text + held

    def _pass(self, text: str) -> str:
        """What may be sent of the text that is held and of some more."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

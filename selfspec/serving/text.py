"""From tokens as they come to text that may be sent: whole characters, and no stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CUT_CHARACTER = "\ufffd"


class TextStream:
    """The text of one answer.

    Held back is the beginning of a character of several tokens, and whatever a stop string may
    begin with. The text ends before the first stop string.

    >>> stream = TextStream(lambda ids: "".join(map(chr, ids)), stops=["END"])
    >>> [stream.add([ord(letter)]) for letter in "EN, END, more"][:5]
    ['', '', 'EN,', ' ', '']
    >>> stream.is_stopped, stream.end()
    (True, '')
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []  # Those of the last piece that was sent, and what came behind it.
        self._num_before = 0  # So many of them were sent.
        self._before = ""  # Their text.
        self._held = ""
        self.is_stopped = False

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next tokens; returns what may be sent now."""
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith(_CUT_CHARACTER):
            return ""
        return self._pass(self._new(text))

    def end(self) -> str:
        """What is left, when no token comes any more."""
        text = self._pass(self._new(self._decode(self._ids)))
        held, self._held = self._held, ""
        return text if self.is_stopped else text + held

    def _new(self, text: str) -> str:
        new = text[len(self._before) :]
        self._ids = self._ids[self._num_before :]
        self._num_before = len(self._ids)
        self._before = self._decode(self._ids)
        return new

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

"""Turns tokens, one at a time, into text that never has to be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Words"]

_BROKEN = "\ufffd"  # Decoders write this for a character whose bytes are incomplete.
_SEED = 8  # Tokens of the prompt in front, since some decoders strip the space of a first word.


class Words:
    """Decodes token by token; holds back the bytes of a character until the last one is there.

    What `add` and `rest` return is together the decoded text, without special tokens.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_SEED:])
        self._start = 0  # Decoding starts here; ids up to `_end` are only context.
        self._end = len(self._ids)

    def add(self, *token_ids: int) -> str:
        """The text that these tokens complete, often none; decodes a few tokens twice."""
        self._ids += token_ids
        text = self._fresh_text()
        return "" if text.endswith(_BROKEN) else self._take(text)

    def rest(self) -> str:
        """The text that was held back, for when no more tokens will come."""
        return self._take(self._fresh_text())

    def _fresh_text(self) -> str:
        before = self._decode(self._ids[self._start : self._end])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _take(self, text: str) -> str:
        if text:  # A special token gives no text, and so no context.
            self._start, self._end = self._end, len(self._ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(  # type: ignore[no-any-return]
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

"""Turns tokens, one at a time, into text that is final."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # Decoders write this for a character whose bytes are incomplete.
# Decoding starts 8 tokens before the answer, since some decoders strip the space of a first word.
_CONTEXT = 8


class TextStream:
    """Decodes token by token, and holds back a character until all of its bytes have come.

    What `add` and `rest` return is together the decoded text, by default without special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int] = (),
        *,
        skips_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._start = 0  # Decoding starts here; ids up to `_end` are only context.
        self._end = len(self._ids)

    def add(self, *token_ids: int) -> str:
        """The text that these tokens complete, often none. Decodes a few tokens twice."""
        self._ids += token_ids
        text = self._fresh_text()
        return "" if text.endswith(_BROKEN) else self._take(text)

    def rest(self) -> str:
        """The text that was held back; call it after the last token."""
        return self._take(self._fresh_text())

    def _fresh_text(self) -> str:
        before = self.decoded(self._ids[self._start : self._end])
        return self.decoded(self._ids[self._start :])[len(before) :]

    def _take(self, text: str) -> str:
        if text:  # A special token gives no text, and so no context.
            self._start, self._end = self._end, len(self._ids)
        return text

    def decoded(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        return str(text)


class LiveText(TextStream):
    """A streamer of `generate()` for one row: `show` gets the pieces of its answer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        show: Callable[[str], object],
    ) -> None:
        super().__init__(tokenizer, prompt_ids)
        self.text = ""
        self._show = show
        self._prompt_came = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one token at a time."""
        if self._prompt_came:
            self._say(self.add(int(value)))
        self._prompt_came = True

    def end(self) -> None:
        self._say(self.rest())

    def _say(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._show(piece)

"""Shows the text of a running `generate()` call as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class LiveText:
    """A streamer: `show` gets each piece of the answer as soon as its characters are whole."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        show: Callable[[str], object],
    ) -> None:
        from selfspec.batch.text_stream import TextStream

        self.text = ""
        self._show = show
        self._stream = TextStream(tokenizer, prompt_ids)
        self._prompt_came = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one token of the only row."""
        if self._prompt_came:
            self._say(self._stream.add(int(value)))
        self._prompt_came = True

    def end(self) -> None:
        self._say(self._stream.rest())

    def _say(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._show(piece)

"""Shows the text of a running `generate()` call, each piece with the origin of its token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from selfspec.records import StepRecord, sources_of

OWN = "model"  # The model's next token after a draft.
SEVERAL = "several"  # More than one source has named the token.


class LiveText:
    """A streamer and a listener in one; `show(piece, origin)` gets the text.

    Tokens come through the streamer and wait until the record of their step names their origin.
    A call that is decoded plainly has no records, and shows tokens as they come.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        show: Callable[[str, str], object],
    ) -> None:
        from selfspec.batch.text_stream import TextStream

        self._prompt_came = False
        self.text = ""
        self._stream = TextStream(tokenizer, prompt_ids)
        self._show = show
        self._waiting: list[int] = []
        self._has_records = False

    def put(self, value: Any) -> None:
        """Takes the prompt, then one token of the only row."""
        if not self._prompt_came:
            self._prompt_came = True
            return
        self._waiting.append(int(value))
        # With drafts, the record of the first token comes before the second token.
        if not self._has_records and len(self._waiting) > 1:
            self._emit([OWN] * len(self._waiting))

    def hear(self, record: StepRecord) -> None:
        self._has_records = True
        sources = (set(sources_of(record.tree.evidence[node])) for node in record.accepted_nodes())
        drafted = [SEVERAL if len(names) > 1 else next(iter(names), OWN) for names in sources]
        self._emit(drafted + [OWN] * (len(record.committed_ids) - len(drafted)))

    def end(self) -> None:
        self._emit([OWN] * len(self._waiting))
        self._say(self._stream.rest(), OWN)

    def _emit(self, token_origins: list[str]) -> None:
        for token_id, origin in zip(self._waiting, token_origins, strict=True):
            self._say(self._stream.add(token_id), origin)
        self._waiting.clear()

    def _say(self, piece: str, origin: str) -> None:
        if piece:
            self.text += piece
            self._show(piece, origin)

"""The text of a running `generate()` call, each piece with where its token came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from selfspec.cli.words import Words
from selfspec.records import Evidence, StepRecord

__all__ = ["OWN", "SEVERAL", "LiveText", "origin_of", "origins"]

OWN = "model"  # the model's own next token, not drafted
SEVERAL = "several"  # named by more than one source


def origin_of(evidence: Sequence[Evidence]) -> str:
    """The source that named a drafted token, or `SEVERAL`."""
    names = {item.source for item in evidence}
    return names.pop() if len(names) == 1 else SEVERAL


def origins(record: StepRecord) -> list[str]:
    """Where each committed token of a step came from."""
    drafted = [origin_of(record.tree.evidence[node]) for node in record.accepted_nodes()]
    return drafted + [OWN] * (len(record.committed_ids) - len(drafted))


class LiveText:
    """A streamer and a listener at once; `show(piece, origin)` gets the text.

    Tokens come through the streamer and wait there until the step's record says where they came
    from. A call that is decoded plainly has no records: then they are shown as they come.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        show: Callable[[str, str], object],
    ) -> None:
        self.text = ""
        self._words = Words(tokenizer, prompt_ids)
        self._show = show
        self._waiting: list[int] = []
        self._prompt_came = False
        self._has_records = False

    def put(self, value: Any) -> None:
        """Takes the prompt, then one token of the only row."""
        if not self._prompt_came:
            self._prompt_came = True
            return
        self._waiting.append(int(value))
        if not self._has_records and len(self._waiting) > 1:  # the first token's would be here
            self._emit([OWN] * len(self._waiting))

    def hear(self, record: StepRecord) -> None:
        """Shows the tokens of a step."""
        self._has_records = True
        self._emit(origins(record))

    def end(self) -> None:
        """Shows what is left."""
        self._emit([OWN] * len(self._waiting))
        self._say(self._words.rest(), OWN)

    def _emit(self, token_origins: list[str]) -> None:
        for token_id, origin in zip(self._waiting, token_origins, strict=True):
            self._say(self._words.add(token_id), origin)
        self._waiting.clear()

    def _say(self, piece: str, origin: str) -> None:
        if piece:
            self.text += piece
            self._show(piece, origin)

"""From the tokens of one text to the pieces of its reply: text, calls of tools, and scores."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import regex
import torch

from selfspec.batch import Answer
from selfspec.batch.calls import CallReader, form_of
from selfspec.batch.text_stream import TextStream
from selfspec.prompt import Prompt
from selfspec.serving.replies import Piece
from selfspec.serving.schema import Chat, TextRequest
from selfspec.serving.settings import Settings


class StopFinder:
    """Looks for stop strings in a text that comes in pieces, up to the first one."""

    def __init__(self, stops: Sequence[str]) -> None:
        pattern = "|".join(map(regex.escape, sorted(stops, key=len)))
        self._pattern = regex.compile(pattern or "(?!)")  # Without stop strings nothing matches.
        self._held = ""  # The end of the text, where a stop string may have begun.

    def add(self, text: str) -> tuple[str, bool]:
        """The text up to a stop string, or to where one may have begun, and whether there is one.

        >>> StopFinder(["end"]).add("the end of")
        ('the ', True)
        """
        text = self.rest() + text
        if stop := self._pattern.search(text):
            return text[: stop.start()], True
        begun = self._pattern.search(text, partial=True)
        end = len(text) if begun is None else begun.start()
        self._held = text[end:]
        return text[:end], False

    def rest(self) -> str:
        """The text that was held back."""
        text, self._held = self._held, ""
        return text


class ReplyDecoder:
    """Makes the pieces of one reply, all in the thread of the model.

    Nothing of a stop string is sent. Stop strings are looked for in the text outside of calls. Of
    special tokens only those that belong to calls or are stop strings have a text.

    A reply with stop strings is also the stopping criterion of its text. Then the criterion decodes
    the tokens, and `on_tokens`, which may get a token before or after it, does not. A whole reply
    that has neither stop strings nor tools is decoded at its end, all at once.
    """

    is_row_wise = True

    def __init__(self, choice: int, tokenizer: Any, settings: Settings) -> None:
        form = form_of(str(tokenizer.chat_template))
        tools = settings.callable_tools if isinstance(settings, Chat) else []
        names = [tool.function.name for tool in tools]
        skips_special = settings.skip_special_tokens
        self.is_criterion = bool(settings.stops)
        self.first_at: float | None = None  # When the first token came, by `perf_counter`.
        self._choice = choice
        self._streams = isinstance(settings, TextRequest) and settings.stream
        self._stream = TextStream(tokenizer, skips_special=skips_special)
        self._reader = CallReader(form, names) if names else None
        self._waits_for_end = not (self._streams or self.is_criterion or names)
        self._calls_only = isinstance(settings, Chat) and settings.must_call
        self._stops = StopFinder(settings.stops)
        self._is_stopped = False
        shown = {*settings.stops, *(form.marks if names else ())}
        added = tokenizer.added_tokens_decoder if shown and skips_special else {}
        special = {id: str(token) for id, token in added.items() if token.special}
        self._marks = {id: text for id, text in special.items() if text in shown}
        self._num_decoded = 0
        self._num_scored = 0
        self._parts: list[str | dict[str, Any]] = []  # What was decoded, and is in no piece yet.
        self._pieces: list[Piece] = []  # What is to be sent.

    def begin(self, prompt: Prompt, echo: str | list[int]) -> None:
        """Makes the first piece, before the prompt is read; `echo` stands in front of the text."""
        text = echo if isinstance(echo, str) else self._stream.decoded(echo)
        self._scores = prompt.scores
        self._pieces = [Piece(self._choice, text, is_first=True)]

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_more: object) -> torch.Tensor:
        self._decode([int(input_ids[0, -1])])
        return torch.tensor([self._is_stopped], device=input_ids.device)

    def on_tokens(self, ids: Sequence[int]) -> list[Piece]:
        """Takes the next tokens; returns what is to be sent now, which in a whole reply is none."""
        self.first_at = self.first_at or perf_counter()
        if self._waits_for_end:
            return []
        if not self.is_criterion:
            self._decode(ids)
        self._add_pieces()
        return self.take() if self._streams else []

    def take(self) -> list[Piece]:
        """The pieces that may be sent now."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self, answer: Answer) -> list[Piece]:
        """The last pieces of a text that is complete, and why it ended."""
        reader = self._reader
        self._decode(answer.ids[self._num_decoded :])  # Criteria don't see a text's last token.
        self._show(self._stream.rest())
        head = "" if reader is None else reader.end()  # A call may have begun.
        if self._calls_only:
            self._parts.append(self._stops.rest() + head)
        else:
            self._add_text(head)
            self._parts.append(self._stops.rest())
        self._add_pieces()
        reason = "stop" if self._is_stopped else answer.finish_reason
        if reason == "stop" and reader is not None and reader.has_called:
            reason = "tool_calls"
        return [*self.take(), Piece(self._choice, "", reason)]

    def _decode(self, ids: Sequence[int]) -> None:
        self._num_decoded += len(ids)
        if not self._marks.keys() & ids:
            self._show(self._stream.add(*ids))
            return
        for token in ids:
            mark = self._marks.get(token)
            self._show(self._stream.add(token) if mark is None else self._stream.rest() + mark)

    def _show(self, text: str) -> None:
        for part in [text] if self._reader is None else self._reader.add(text):
            if isinstance(part, str):
                self._add_text(part)
            else:  # No stop string goes past a call.
                self._parts += [self._stops.rest(), part]

    def _add_text(self, text: str) -> None:
        if not self._is_stopped:
            text, self._is_stopped = self._stops.add(text)
            self._parts.append(text)

    def _add_pieces(self) -> None:
        """Makes pieces of what was decoded; the first one has the scores of the fresh tokens."""
        scores = [*(self._scores.prompt or ()), *(self._scores.tokens or ())][self._num_scored :]
        self._num_scored += len(scores)
        for part in self._parts or [""]:
            text, calls = (part, []) if isinstance(part, str) else ("", [part])
            if text or calls or scores:
                self._pieces.append(Piece(self._choice, text, calls=calls, scores=scores))
                scores = []
        self._parts = []

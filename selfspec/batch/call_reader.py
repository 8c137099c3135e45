"""Tells the calls of functions in a text from other text, while it comes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import regex

from selfspec.batch.call_forms import CallForm
from selfspec.draft.sources.json_text import JsonText


class CallReader:
    """Reads a text that keeps to the grammar of a form, in pieces of any size.

    Whitespace alone, as between two calls, is no text.
    """

    def __init__(self, form: CallForm, names: Sequence[str]) -> None:
        self.num_calls = 0
        self._text, self._end = "", 0  # The text so far, and how far it was handed on.
        self._is_text = False  # Has any text but whitespace come since the last call?
        self._arguments: JsonText | None = None  # of the call that is being written
        self._is_after = False  # Are a call's arguments complete, and its end tag not yet?
        escape = regex.escape
        head = escape(form.head("*")).replace(r"\*", f"({'|'.join(names)})")
        begins = [escape(form.tag + begin) for begin in form.begins] if form.tag else []
        begins += [] if form.needs_tag else ["^"]
        ends = [escape("".join(form.end))]
        if form.between:
            ends.append(escape(form.between) + head)
        self._opening = regex.compile(f"(?:{'|'.join(begins)}){head}", regex.MULTILINE)
        self._closing = regex.compile(f"}}(?:{'|'.join(ends)})")

    @property
    def has_called(self) -> bool:
        """Is there a call, and are the arguments of the last one complete?"""
        return self.num_calls > 0 and self._arguments is None

    def add(self, text: str) -> list[str | dict[str, Any]]:
        """Takes more of a text; returns in order other text, and calls in parts as OpenAI has them.

        A part that goes on with a call has its index and more of its arguments.
        """
        self._text += text
        parts, before = list[str | dict[str, Any]](), -1
        while before < self._end:
            before = self._end
            if self._arguments is not None:
                parts += self._read_arguments()
            elif self._is_after:
                parts += self._read_end()
            else:
                parts += self._read_text()
        return parts

    def end(self) -> str:
        """What was held back, if it is no part of a call."""
        rest = self._text[self._end :]
        is_text = self._arguments is None and not self._is_after
        return rest if is_text and (rest.strip() or not self.num_calls) else ""

    def _read_text(self) -> Iterator[str | dict[str, Any]]:
        """The text up to an opening, or to where one may have begun."""
        opening = self._opening.search(self._text, self._end, partial=True)
        end = len(self._text) if opening is None else opening.start()
        is_opened = opening is not None and not opening.partial
        text = self._text[self._end : end]
        if not (self._is_text or text.strip()):
            text, end = "", end if is_opened else self._end
        self._is_text = self._is_text or bool(text)
        self._end = end
        if text:
            yield text
        if is_opened:
            yield self._begin(opening)

    def _begin(self, head: Any) -> dict[str, Any]:
        self._end, self._arguments = head.end(), JsonText()
        self._is_text = self._is_after = False
        function = {"name": head[1], "arguments": ""}
        about = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self.num_calls += 1
        return {"index": self.num_calls - 1, **about}

    def _read_arguments(self) -> Iterator[dict[str, Any]]:
        text, start = self._arguments, self._end
        while text is not None and self._end < len(self._text):
            text = text.read(self._text[self._end].encode())
            self._end += 1
            if not text.open and not text.is_string:
                text, self._is_after = None, True
        self._arguments = text
        if piece := self._text[start : self._end]:
            yield {"index": self.num_calls - 1, "function": {"arguments": piece}}

    def _read_end(self) -> Iterator[dict[str, Any]]:
        """Goes on after the end of a call, or in the next one, once either is there.

        The grammar allows nothing else, unless a special token cut what looked like a call. A part
        without arguments says that the call has taken this text.
        """
        yield {"index": self.num_calls - 1, "function": {"arguments": ""}}
        closing = self._closing.match(self._text, self._end, partial=True)
        self._is_after = closing is not None and closing.partial
        if closing is None or closing.partial:
            return
        if closing.lastindex:
            yield self._begin(closing)
        else:
            self._end = closing.end()

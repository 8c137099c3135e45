"""Tells the calls of functions in a text from other text, while it comes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from json import JSONDecoder
from typing import Any

import regex

from selfspec.batch.call_forms import CallForm

_JSON = JSONDecoder(parse_int=str)  # Python refuses to read numbers with very many digits.


class CallReader:
    """Reads a text that keeps to the grammar of a form, in pieces of any size.

    Whitespace alone, as between two calls, is no text.
    """

    def __init__(self, form: CallForm, names: Sequence[str]) -> None:
        self.num_calls = 0
        self._text, self._end = "", 0  # The text so far, and how far it was handed on.
        self._is_text = False  # Has any text but whitespace come since the last call?
        self._start: int | None = None  # Where the arguments begin that have not ended.
        self._is_after = False  # Has the last call's end tag not come, though its arguments have?
        escape = regex.escape
        head = escape(form.head("*")).replace(r"\*", f"({'|'.join(names)})") + r"\{"
        begins = [escape(form.tag + begin) for begin in form.begins]
        begins += ["^"] if form.is_bare else []
        ends = [escape("".join(form.end))]
        if form.between:
            ends.append(escape(form.between) + head)
        self._opening = regex.compile(f"(?:{'|'.join(begins)}){head}")
        self._closing = regex.compile(f"}}(?:{'|'.join(ends)})")

    @property
    def has_called(self) -> bool:
        """Is there a call, and are the arguments of the last one complete?"""
        return self.num_calls > 0 and self._start is None

    def add(self, text: str) -> list[str | dict[str, Any]]:
        """Takes more of a text; returns in order other text, and calls in parts as OpenAI has them.

        A part that goes on with a call has its index and more of its arguments.
        """
        self._text += text
        parts, before = list[str | dict[str, Any]](), -1
        while before < self._end:
            before = self._end
            if self._start is not None:
                parts.append(self._read_arguments(self._start))
            elif self._is_after:
                parts += self._read_end()
            else:
                parts += self._read_text()
        return parts

    def end(self) -> str:
        """The text that was held back, if it is no part of a call."""
        rest = self._text[self._end :]
        is_text = self._start is None and not self._is_after
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
        self._end = self._start = head.end() - 1
        self._is_text = self._is_after = False
        function = {"name": head[1], "arguments": ""}
        about = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self.num_calls += 1
        return {"index": self.num_calls - 1, **about}

    def _read_arguments(self, start: int) -> dict[str, Any]:
        """The fresh part of the arguments, which are an object that a bracket may end."""
        before, self._end = self._end, len(self._text)
        if "}" in self._text[before:]:
            try:
                _, self._end = _JSON.raw_decode(self._text, start)
                self._start, self._is_after = None, True
            except (RecursionError, ValueError):
                pass  # It goes on.
        return self._more(self._text[before : self._end])

    def _read_end(self) -> Iterator[dict[str, Any]]:
        """Goes on after the end of a call, or in the next one, once either is there.

        The grammar allows nothing else, unless a special token cut what looked like a call. A part
        without arguments says that the call has taken this text.
        """
        yield self._more("")
        closing = self._closing.match(self._text, self._end, partial=True)
        self._is_after = closing is not None and closing.partial
        if closing is None or closing.partial:
            return
        if closing.lastindex:
            yield self._begin(closing)
        else:
            self._end = closing.end()

    def _more(self, arguments: str) -> dict[str, Any]:
        return {"index": self.num_calls - 1, "function": {"arguments": arguments}}

"""Tells the calls of functions in a text from other text, while it comes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

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
        heads = [form.head(name) for name in names]
        self._bare = [] if form.needs_tag else heads
        tags = [form.tag + begin for begin in form.begins] if form.tag else []
        self._tagged = [tag + head for tag in tags for head in heads]
        self._nexts = ["}" + form.between + head for head in heads] if form.between else []
        self._closing = "}" + "".join(form.end)
        self._longest = max(map(len, self._bare + self._tagged))
        head = re.escape(form.head("*")).replace(r"\*", f"({'|'.join(names)})")
        begins = [re.escape(tag) for tag in tags]
        if not form.needs_tag:
            begins.append("^")
        self._opening = re.compile(f"(?:{'|'.join(begins)}){head}", re.MULTILINE)
        self._next = re.compile("}" + re.escape(form.between) + head)

    @property
    def has_called(self) -> bool:
        """Is there a call, and are the arguments of the last one complete?"""
        return self.num_calls > 0 and self._arguments is None

    def add(self, text: str, calls: list[dict[str, Any]]) -> str:
        """Takes more of a text; returns other text, and puts parts of calls to `calls`.

        The parts are as OpenAI streams them. Those of one call become one, as long as they are in
        the same list.
        """
        self._text += text
        other, before = "", -1
        while before < self._end:
            before = self._end
            if self._arguments is not None:
                self._read_arguments(calls)
            elif self._is_after:
                self._read_end(calls)
            else:
                other += self._read_text(calls)
        return other

    def end(self) -> str:
        """What was held back, if it is no part of a call."""
        rest = self._text[self._end :]
        is_text = self._arguments is None and not self._is_after
        return rest if is_text and (rest.strip() or not self.num_calls) else ""

    def _read_text(self, calls: list[dict[str, Any]]) -> str:
        opening = self._opening.search(self._text, self._end)
        end = opening.start() if opening else self._sure_end()
        text = self._text[self._end : end]
        if not (self._is_text or text.strip()):
            text, end = "", end if opening else self._end
        self._is_text = self._is_text or bool(text)
        self._end = end
        if opening:
            self._begin(opening, calls)
        return text

    def _sure_end(self) -> int:
        """How far the text is certainly no part of a call, whatever comes next."""
        text = self._text
        for place in range(max(self._end, len(text) - self._longest), len(text)):
            is_line = not place or text[place - 1] == "\n"
            openings = self._tagged + self._bare if is_line else self._tagged
            if any(opening.startswith(text[place:]) for opening in openings):
                return place
        return len(text)

    def _begin(self, head: re.Match[str], calls: list[dict[str, Any]]) -> None:
        self._end, self._arguments = head.end(), JsonText()
        self._is_text = self._is_after = False
        function = {"name": head[1], "arguments": ""}
        about = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        calls.append({"index": self.num_calls, **about})
        self.num_calls += 1

    def _read_arguments(self, calls: list[dict[str, Any]]) -> None:
        text, start = self._arguments, self._end
        while text is not None and self._end < len(self._text):
            text = text.read(self._text[self._end].encode())
            self._end += 1
            if not text.open and not text.is_string:
                text, self._is_after = None, True
        self._arguments = text
        index, piece = self.num_calls - 1, self._text[start : self._end]
        if calls and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += piece
        elif piece:
            calls.append({"index": index, "function": {"arguments": piece}})

    def _read_end(self, calls: list[dict[str, Any]]) -> None:
        rest, head = self._text[self._end :], self._next.match(self._text, self._end)
        if self._nexts and head:
            self._begin(head, calls)
        elif rest.startswith(self._closing):
            self._end, self._is_after = self._end + len(self._closing), False
        else:
            # The grammar allows nothing else, unless a special token cut what looked like a call.
            ways_on = [*self._nexts, self._closing]
            self._is_after = any(way.startswith(rest) for way in ways_on)

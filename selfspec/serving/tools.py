"""Functions that a model may call: the grammar of the calls, and the calls in the text it writes.

A call is written as the model's chat template shows calls, between ``<tool_call>`` tags, or as
plain JSON: ``{"name": "weather", "arguments": {"city": "Paris"}}``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from selfspec.draft.sources.json_text import JsonText
from selfspec.serving.schema import Chat, RequestError, Tool

__all__ = ["CallReader", "grammar_of", "joined"]

_TAG = "<tool_call>"
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_HEAD = re.compile(r'\s*(?:<tool_call>\s*)?\{"name": "([^"]*)", "arguments": ')
_BETWEEN = re.compile(r"[\s}]*(?:</tool_call>)?\s*")
_LONGEST_HEAD = 128  # Characters; a name has at most 64.


def grammar_of(chat: Chat, template: str) -> str:
    """The grammar, in the syntax of Lark, of texts that may or must call one of the tools."""
    tools, has_tag = chat.callable_tools, _TAG in template
    begin, end = (f"{_TAG}\n", "\n</tool_call>") if has_tag else ("", "")
    heads = (f'{begin}{{"name": "{each.function.name}", "arguments": ' for each in tools)
    calls = (f"{json.dumps(head)} args_{i} {json.dumps('}' + end)}" for i, head in enumerate(heads))
    rules = [f"call: {' | '.join(calls)}"]
    rules += [f"args_{i}: %json {_arguments(i, each)}" for i, each in enumerate(tools)]
    several = ' ("\\n" call)*' if has_tag and chat.parallel_tool_calls is not False else ""
    if chat.tool_choice in (None, "auto"):
        first = re.escape((begin or "{")[0])
        rules.append(f"TEXT: /[^{first}](.|\\n)*/")
        return "\n".join([f"start: TEXT | call{several}", *rules])
    return "\n".join([f"start: call{several}", *rules])


def _arguments(number: int, tool: Tool) -> str:
    schema = tool.function.parameters
    if schema.get("type") != "object":
        rule = f"tools[{number}].function.parameters must be a schema of type 'object'"
        raise RequestError(f"{rule} (got {schema.get('type')!r:.80})", field="tools")
    return json.dumps({"x-guidance": _JSON, **schema})


class CallReader:
    """Tells the calls in a text from other text, while it comes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._rest = ""  # What may still be the beginning of a call.
        self._arguments: JsonText | None = None  # of the call that is being written
        self._is_text = False

    def add(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Takes more of a text; returns other text and parts of calls, as OpenAI streams them."""
        if self._is_text:
            return text, []
        self._rest += text
        parts: list[dict[str, Any]] = []
        while self._rest:
            if self._arguments is not None:
                self._read_arguments(parts)
            elif not self._read_head(parts):
                break
        return self._as_text(), parts

    def end(self) -> str:
        """What was held back, if it is no call."""
        return "" if self.num_calls else self._rest

    def _read_head(self, parts: list[dict[str, Any]]) -> bool:
        if self.num_calls:
            between = _BETWEEN.match(self._rest)
            self._rest = self._rest[between.end() if between else 0 :]
        head = _HEAD.match(self._rest)
        if head is None or head[1] not in self._names:
            return False
        self._rest, self._arguments = self._rest[head.end() :], JsonText()
        function = {"name": head[1], "arguments": ""}
        about = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        parts.append({"index": self.num_calls, **about})
        self.num_calls += 1
        return True

    def _read_arguments(self, parts: list[dict[str, Any]]) -> None:
        text, length = self._arguments, 0
        while text is not None and length < len(self._rest):
            text = text.read(self._rest[length].encode())
            length += 1
            if not text.open and not text.is_string:
                text = None
        piece, self._rest = self._rest[:length], self._rest[length:]
        parts.append({"index": self.num_calls - 1, "function": {"arguments": piece}})
        self._arguments = text

    def _as_text(self) -> str:
        """What was held back, once it is clear that no call begins with it."""
        begun = self._rest.lstrip()
        if self.num_calls or not begun:
            return ""
        may_be_call = begun[0] in "<{" and len(begun) < _LONGEST_HEAD
        if may_be_call:
            return ""
        self._is_text, text = True, self._rest
        self._rest = ""
        return text


def joined(
    calls: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Whole calls, with further parts of them or of others."""
    whole = list(calls)
    for part in parts:
        index, more = part["index"], part["function"]["arguments"]
        if index == len(whole):
            whole.append({name: each for name, each in part.items() if name != "index"})
            continue
        function = dict(whole[index]["function"])
        function["arguments"] += more
        whole[index] = {**whole[index], "function": function}
    return whole

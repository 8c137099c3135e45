"""How models write calls of functions, and the grammar that lets them.

Outside of calls a text is free. A call begins with the tag that the chat template shows, or, where
there is none, with ``{"name": "weather", "arguments": `` at the beginning of a line. From there on
the grammar allows only what the function's schema does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallForm(NamedTuple):
    """How calls are written: a tag, one call or several as JSON, and an end."""

    tag: str = ""
    begins: tuple[str, ...] = ("",)  # What may come between the tag and the first call.
    between: str = ""  # What separates calls that share a tag; if empty, none do.
    end: tuple[str, ...] = ()  # Texts that may be tokens of their own.
    key: str = "arguments"
    needs_tag: bool = True  # If not, a call is also JSON at the beginning of a line.

    @property
    def marks(self) -> set[str]:
        """The parts that may be special tokens."""
        return {self.tag, *self.end} - {""}

    def head(self, name: str) -> str:
        return f'{{"name": "{name}", "{self.key}": '


_TAGGED = CallForm("<tool_call>", ("\n",), end=("\n", "</tool_call>"))  # Qwen, Hermes
_LIST = CallForm("[TOOL_CALLS]", (" [", "["), ", ", ("]",))  # Mistral
_PARAMETERS = CallForm("<|python_tag|>", key="parameters", needs_tag=False)  # Llama 3
_PLAIN = CallForm(needs_tag=False)


def form_of(template: str) -> CallForm:
    for form in (_TAGGED, _LIST):
        if form.tag in template:
            return form
    return _PARAMETERS if '"parameters":' in template else _PLAIN


def grammar_of(
    functions: Mapping[str, dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    must_call: bool,
    is_single: bool,
) -> str:
    """The grammar, in the syntax of Lark, of texts that may or must call functions.

    `functions` has the schemas of their arguments. With `is_single` there is one call at most.
    """
    form = form_of(str(tokenizer.chat_template))
    grammar = _Grammar(form, tokenizer, functions)
    if must_call:
        rules = grammar.calls_alone(is_single)
    else:
        rules = (grammar.tagged if form.needs_tag else grammar.untagged)(is_single)
    return "\n".join([*rules, *grammar.groups(is_single)])


class _Grammar:
    """The rules for the functions of one request.

    A `lazy` rule ends as soon as it matches, so that text can't run past a tag. In llguidance text
    matches no special tokens, so these stand between texts.
    """

    def __init__(
        self,
        form: CallForm,
        tokenizer: PreTrainedTokenizerBase,
        functions: Mapping[str, dict[str, Any]],
    ) -> None:
        self._form, self._functions = form, functions
        self._ids: dict[str, int] = tokenizer.get_added_vocab()
        special = set[int]()
        for id_, token in tokenizer.added_tokens_decoder.items():
            text = token.content
            # llguidance takes <think> for a special token too.
            if (token.special or (text[0] == "<" and text[-1] == ">")) and text != form.tag:
                special.add(id_)
        self._special = _ranges(special)

    def calls_alone(self, is_single: bool) -> list[str]:
        begin = "" if not self._form.needs_tag else self._mark(self._form.tag)
        more = "" if is_single or self._form.between else f' ("\\n" {begin} group)*'
        return [f"start: {begin} group{more}"]

    def tagged(self, is_single: bool) -> list[str]:
        tag, token = self._form.tag, self._ids.get(self._form.tag)
        rules = ["tag: written" + ("" if token is None else f" | TEXT <[{token}]>")]
        rules += [f"written[lazy]: TEXT {json.dumps(tag)}", f"free: TEXT {self._special}"]
        start = "free* (TEXT | tag group)" if is_single else "(free | tag group)* TEXT"
        return [f"start: {start}", *rules]

    def untagged(self, is_single: bool) -> list[str]:
        """Free text, and calls at the beginnings of lines.

        `line` is what was written so far if it is empty or ends with a newline, and `inside` is
        any other text. A special token may follow both.
        """
        token = self._ids.get(self._form.tag)
        tagged = [] if token is None else [f"(line | inside) TEXT <[{token}]> group"]
        called = " | ".join(["line first", "inside later", *tagged])
        heads = [json.dumps(self._form.head(name)) for name in self._functions]
        once, again = (" | called", "") if is_single else ("", " | called")
        rules = [
            f"start: (line | inside) TEXT{once}",
            f"called: {called}",
            f"line: | (line | line LINES | inside LINES) {self._special}",
            f"inside: (inside | line WORDS | inside WORDS) {self._special}{again}",
            "LINES: /(.|\\n)*\\n/",
            "WORDS: /(.|\\n)*[^\\n]/",
        ]
        for rule, before in (("first", "LINES?"), ("later", "LINES")):
            calls = (f'{rule}_{i} args_{i} "}}"' for i in range(len(heads)))
            rules.append(f"{rule}: {' | '.join(calls)}")
            rules += [f"{rule}_{i}[lazy]: {before} {head}" for i, head in enumerate(heads)]
        return rules

    def groups(self, is_single: bool) -> list[str]:
        """What follows a tag, and what a text is."""
        form = self._form
        heads = (json.dumps(form.head(name)) for name in self._functions)
        calls = (f'{head} args_{i} "}}"' for i, head in enumerate(heads))
        begins = " | ".join(map(json.dumps, form.begins))
        several = ""
        if form.between and not is_single:
            several = f" ({json.dumps(form.between)} call)*"
        end = " ".join(map(self._mark, form.end))
        rules = [f"group: ({begins}) call{several} {end}", f"call: {' | '.join(calls)}"]
        schemas = enumerate(self._functions.items())
        rules += [f"args_{i}: %json {_arguments(*function)}" for i, function in schemas]
        return [*rules, "TEXT: /(.|\\n)*/"]

    def _mark(self, text: str) -> str:
        """A text that must come: its own token, if there is one."""
        return f"<[{self._ids[text]}]>" if text in self._ids else json.dumps(text)


def _ranges(ids: Iterable[int]) -> str:
    """The special tokens of a grammar, as ranges of ids."""
    ranges = []
    for _, numbered in groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
        run = [id_ for _, id_ in numbered]
        ranges.append(f"{run[0]}-{run[-1]}")
    return f"<[{','.join(ranges)}]>"


def _arguments(name: str, schema: dict[str, Any]) -> str:
    if schema.get("type") != "object":
        rule = f"the parameters of the function {name!r} must be a schema of type 'object'"
        raise UnsupportedError(f"{rule} (got {schema.get('type')!r:.80})")
    return json.dumps({"x-guidance": _JSON, **schema})

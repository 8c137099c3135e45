"""How models write calls of functions, the grammar that lets them, and what reads them back.

Outside of calls a text is free. A call begins with a tag, such as the chat template shows, or for
Llama 3 with ``{"name": "weather", "parameters": `` at the beginning of the answer. From there on
the grammar allows only what the function's schema does.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

from selfspec.batch.guides import Lark, json_rule
from selfspec.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Python refuses to read numbers with very many digits.
_JSON = json.JSONDecoder(parse_int=str)


class CallForm(NamedTuple):
    """How calls are written: a tag, one call or several as JSON, and an end."""

    tag: str
    begins: tuple[str, ...] = ("",)  # What may come between the tag and the first call.
    between: str = ""  # Between calls that share a tag; "": one call for each tag.
    end: tuple[str, ...] = ()  # Texts that may be tokens of their own.
    key: str = "arguments"
    is_bare: bool = False  # Is JSON alone, at the beginning of an answer, its one call?

    @property
    def marks(self) -> set[str]:
        """The parts that may be special tokens."""
        return {self.tag, *self.end}

    def head(self, name: str) -> str:
        return f'{{"name": "{name}", "{self.key}": '


_TAGGED = CallForm("<tool_call>", ("\n",), end=("\n", "</tool_call>"))  # Qwen, Hermes
_LIST = CallForm("[TOOL_CALLS]", (" [", "["), ", ", ("]",))  # Mistral
_BARE = CallForm("<|python_tag|>", key="parameters", is_bare=True)  # Llama 3


def form_of(template: str) -> CallForm:
    """The form that a chat template shows; tags where it shows none."""
    if _LIST.tag in template:
        return _LIST
    return _BARE if '"parameters":' in template and _TAGGED.tag not in template else _TAGGED


def grammar_of(
    functions: Mapping[str, dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    must_call: bool,
    is_single: bool,
) -> Lark:
    """The grammar of texts that may or must call functions.

    `functions` has the schemas of their arguments. With `is_single` there is one call at most.
    A `lazy` rule ends as soon as it matches, so that text can't run past a tag. In llguidance text
    matches no special tokens, so these stand between texts.
    """
    form, ids = form_of(str(tokenizer.chat_template)), tokenizer.get_added_vocab()
    is_single = is_single or form.is_bare
    heads = [json.dumps(form.head(name)) for name in functions]

    def mark(text: str) -> str:
        """A text that must come: its own token, if there is one."""
        return f"<[{ids[text]}]>" if text in ids else json.dumps(text)

    if must_call:
        begin = "" if form.is_bare else mark(form.tag)
        more = "" if is_single or form.between else f' ("\\n" {begin} group)*'
        rules = [f"start: {begin} group{more}"]
    else:
        start = "free* (TEXT | tag group)" if is_single else "(free | tag group)* TEXT"
        rules = [f"start: {start}" + (" | bare" if form.is_bare else "")]
        rules += ["tag: written" + (f" | TEXT {mark(form.tag)}" if form.tag in ids else "")]
        rules += [f"written[lazy]: TEXT {json.dumps(form.tag)}"]
        rules += [f"free: TEXT <[{_special_ids(tokenizer, form.tag)}]>", "TEXT: /(.|\\n)*/"]
        if form.is_bare:
            bare = (f'bare_{i} args_{i} "}}"' for i in range(len(heads)))
            rules += [f"bare: {' | '.join(bare)}"]
            rules += [f"bare_{i}[lazy]: {head}" for i, head in enumerate(heads)]
    several = f" ({json.dumps(form.between)} call)*" if form.between and not is_single else ""
    begins, end = " | ".join(map(json.dumps, form.begins)), " ".join(map(mark, form.end))
    calls = (f'{head} args_{i} "}}"' for i, head in enumerate(heads))
    rules += [f"group: ({begins}) call{several} {end}", f"call: {' | '.join(calls)}"]
    for i, (name, schema) in enumerate(functions.items()):
        if schema.get("type") != "object":
            rule = f"the parameters of the function {name!r} must be a schema of type 'object'"
            raise UnsupportedError(f"{rule} (got {schema.get('type')!r:.80})")
        rules.append(f"args_{i}: {json_rule(schema)}")
    return Lark("\n".join(rules))


def _special_ids(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """The special tokens but for a tag. llguidance takes <think> for a special token too."""
    special = set[int]()
    for id_, token in tokenizer.added_tokens_decoder.items():
        text = token.content
        if (token.special or (text[0] == "<" and text[-1] == ">")) and text != tag:
            special.add(id_)
    return ",".join(map(str, sorted(special)))


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

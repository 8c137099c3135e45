"""How models write calls of functions, and the grammar that lets them.

Outside of calls a text is free. A call begins with a tag, such as the chat template shows, or for
Llama 3 with ``{"name": "weather", "parameters": `` at the beginning of the answer. From there on
the grammar allows only what the function's schema does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.batch.guides import Lark, json_rule
from selfspec.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

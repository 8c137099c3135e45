"""What a grammar forces is drafted, and what it forbids gets no node."""

from __future__ import annotations

import numpy as np
import pytest
import regex

from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.sources.grammar import GrammarCursor, TokenBytes
from selfspec.draft.sources.json_text import JsonText, Spacing
from selfspec.draft.sources.source import Cursor
from selfspec.draft.tree import TreeGrower
from selfspec.records import Candidate, DraftTree, Evidence, StepRecord
from tests.strategies import check_tree

CHARS = [bytes((byte,)) for byte in range(128)]
LIST = [*CHARS, b'",', b' "', b'":', b"name", b"age", b"\n ", b"true", b" true", b""]
WORDS = TokenBytes(LIST)
END = len(LIST) - 1
TEXT = r'\{\s*"name"\s*:\s*"[a-z]*"\s*,\s*"age"\s*:\s*(?:[1-9][0-9]*|true|false)\s*\}'


class Pattern:
    """A grammar that is a regular expression, and asks it for each text whether it may go on."""

    token_bytes = WORDS

    def __init__(self) -> None:
        self.texts = [""]

    def accept(self, token: int) -> bool:
        if token == END or not self._may_go_on(text := self.texts[-1] + WORDS.of(token).decode()):
            return False
        self.texts.append(text)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.texts[len(self.texts) - num_tokens :]

    def mask(self) -> np.ndarray:
        text = self.texts[-1]
        allowed = [bool(w) and self._may_go_on(text + w.decode()) for w in LIST]
        allowed[END] = regex.fullmatch(TEXT, text) is not None
        bits = np.packbits(allowed + [False] * (-len(allowed) % 32), bitorder="little")
        return bits.view(np.uint32)

    def forced(self) -> bytes:
        return b""

    @staticmethod
    def _may_go_on(text: str) -> bool:
        return regex.fullmatch(TEXT, text, partial=True) is not None


def grown(text: bytes, *others: Cursor, max_nodes: int = 32) -> tuple[list[bytes], DraftTree]:
    """The words of the likeliest path of a tree behind a text, and the tree."""
    cursor = GrammarCursor(Pattern())
    cursor.observe(committed(tokens(text)))
    calibration = Calibration()
    tree = TreeGrower([*others, cursor], SpecConfig(), calibration.probability).grow(0, max_nodes)
    check_tree(tree)
    node, path = 0, list[bytes]()
    while tree.children[node]:
        token, node = next(iter(tree.children[node].items()))
        path.append(WORDS.of(token))
    return path, tree


def tokens(text: bytes) -> list[int]:
    """The longest words first."""
    ids = list[int]()
    while text:
        word = WORDS.first(text)
        ids.append(WORDS.token(word))
        text = text[len(word) :]
    return ids


def committed(tokens: list[int]) -> StepRecord:
    return StepRecord(row=0, tree=DraftTree.of_root(0), path=[0], committed_ids=tokens)


def test_a_key_is_drafted_as_a_chain():
    path, _ = grown(b'{ "')
    assert path[:3] == [b"name", b'":', b' "']


def test_spaces_are_those_of_the_text():
    path, _ = grown(b'{\n  "name" : "bob"')
    assert b"".join(path).startswith(b',\n  "age" : ')
    path, _ = grown(b'{"name":"bob"')
    assert b"".join(path).startswith(b',"age":')


def test_the_end_of_a_free_text_is_drafted_with_what_follows():
    path, _ = grown(b'{"name": "bo')
    assert path[:4] == [b'",', b' "', b"age", b'":']


def test_few_words_are_all_drafted_to_their_end():
    _, tree = grown(b'{"name": "bob", "age": tr')
    words = b"".join(WORDS.of(token) for token in tree.tokens[1:])
    assert words.startswith(b"ue")


def test_what_ends_the_text_is_the_only_token():
    _, tree = grown(b'{"name": "bob", "age": 1}')
    forced = tree.looked_at[0]
    assert END in forced.tokens


class Naming(Cursor):
    """Names the same tokens at the root of each tree."""

    def __init__(self, tokens: list[int]) -> None:
        self.candidates = [(token, Evidence("text")) for token in tokens]

    def root(self) -> str:
        return ""

    def expand(self, state: str) -> list[Candidate]:
        return self.candidates


def test_what_is_forbidden_gets_no_node():
    token = tokens(b"true")[0]
    other = Naming([token, ord("n")])
    _, tree = grown(b'{"', other)
    assert tree.looked_at[0].tokens[0] == tokens(b"name")[0]
    assert token not in tree.looked_at[0].tokens
    assert ord("n") in tree.looked_at[0].tokens


def test_the_grammar_is_where_the_text_is_after_any_tree():
    cursor = GrammarCursor(grammar := Pattern())
    grower = TreeGrower([cursor], SpecConfig(), Calibration().probability)
    text = b""
    for piece in (b'{"', b'name": "', b"bob", b'", "age": 12'):
        cursor.observe(committed(tokens(piece)))
        text += piece
        grower.grow(0, 16)
    cursor.observe(committed([]))
    assert grammar.texts[-1].encode() == text


def test_a_text_that_leaves_the_grammar_has_no_drafts_from_it():
    path, _ = grown(b'{"nobody')
    assert path == []


def test_words_are_cut_before_the_last_space():
    assert [WORDS.of(token) for token in tokens(b'",\n  "age')] == [
        b'",',
        b"\n ",
        b' "',
        b"age",
    ]


@pytest.mark.parametrize(
    ("text", "char", "expected"),
    [
        (b'{"a": 1', ",", (b"", False)),
        (b'{"a": 1, "b"', ":", (b"", True)),
        (b'{"a": 1,', '"', (b" ", False)),
        (b'{\n  "a": {', '"', (b"\n    ", True)),
        (b'{\n  "a": [', "1", (b"\n    ", False)),
        (b'{\n  "a": {\n    "b": 1\n  }', "}", (b"\n", True)),
        (b"", "{", (b"", False)),
    ],
)
def test_spacing(text, char, expected):
    spacing = Spacing()
    assert spacing.before(JsonText().read(text, spacing), ord(char)) == expected


def test_the_inside_of_a_value_is_one_object():
    text = JsonText().read(b'{"a": "x')
    assert text.is_string
    assert text.read(b"yz, {") is text
    assert not text.read(rb"\"").read(b'"').is_string
    number = JsonText().read(b'{"a": 1')
    assert number.read(b"23") is number

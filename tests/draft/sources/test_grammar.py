"""What a grammar forces is drafted, and what it forbids gets no node."""

from __future__ import annotations

import numpy as np
import regex

from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.ranking import Ranking
from selfspec.draft.sources.grammar import GrammarCursor
from selfspec.draft.sources.source import Cursor
from selfspec.draft.tree import TreeGrower
from selfspec.records import Candidate, DraftTree, Evidence, StepRecord
from tests.strategies import check_tree

# Characters, an end of the text, and words of several characters.
END, TRUE, QUOTED_A = 128, 129, 130
WORDS = {TRUE: "true", QUOTED_A: '"a'}
TEXT = r'\{"name": "[a-z]*", "age": (?:[1-9][0-9]*|true|false)\}'


class Pattern:
    """A grammar that is a regular expression, and asks it for each text whether it may go on."""

    def __init__(self) -> None:
        self.texts = [""]

    def accept(self, token: int) -> bool:
        if token == END or not may_go_on(text := self.texts[-1] + word_of(token)):
            return False
        self.texts.append(text)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.texts[len(self.texts) - num_tokens :]

    def mask(self) -> np.ndarray:
        text = self.texts[-1]
        allowed = [token != END and may_go_on(text + word_of(token)) for token in range(160)]
        allowed[END] = regex.fullmatch(TEXT, text) is not None
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def forced(self) -> list[int]:
        text, tokens = self.texts[-1], list[int]()
        while len(chars := [char for char in range(128) if may_go_on(text + chr(char))]) == 1:
            tokens += chars
            text += chr(chars[0])
        return tokens


def may_go_on(text: str) -> bool:
    return regex.fullmatch(TEXT, text, partial=True) is not None


def word_of(token: int) -> str:
    return chr(token) if token < END else WORDS.get(token, "#")


def grown(text: str, *others: Cursor, max_nodes: int = 32) -> tuple[str, DraftTree]:
    """The likeliest path of a tree after a text, and the tree."""
    cursor = GrammarCursor(Pattern())
    cursor.observe(committed(text))
    calibration = Calibration()
    tree = TreeGrower([*others, cursor], SpecConfig(), Ranking(calibration.probability)).grow(
        0, max_nodes
    )
    check_tree(tree)
    node, path = 0, ""
    while tree.children[node]:
        token, node = next(iter(tree.children[node].items()))
        path += word_of(token)
    return path, tree


def committed(text: str) -> StepRecord:
    tree = DraftTree.of_root(0)
    return StepRecord(row=0, tree=tree, path=[0], committed_ids=list(map(ord, text)))


def test_a_key_is_drafted_as_a_chain():
    path, tree = grown("{")
    assert path == '"name": "'
    assert len(tree) == 1 + len(path)


def test_the_last_token_of_a_forced_text_is_less_sure():
    _, tree = grown('{"name": ')
    assert tree.tokens[1] == ord('"')
    assert tree.scores[1] < grown('{"name":')[1].scores[1]


def test_what_is_free_has_no_drafts():
    assert grown('{"name": "bo')[0] == ""


def test_what_ends_the_text_is_the_only_token():
    _, tree = grown('{"name": "bob", "age": true}')
    assert tree.tokens == [0, END]


class Naming(Cursor):
    """Names the same tokens at the root of each tree."""

    def __init__(self, *tokens: int) -> None:
        self.candidates = [(token, Evidence("text")) for token in tokens]

    def root(self) -> str:
        return ""

    def expand(self, state: str) -> list[Candidate]:
        return self.candidates


def test_what_is_forbidden_gets_no_node():
    _, tree = grown('{"name": "bob", "age": ', Naming(TRUE, ord("x"), ord("5")))
    assert set(tree.looked_at[0].tokens) == {TRUE, ord("5")}


def test_the_grammar_is_where_the_text_is_after_any_tree():
    cursor = GrammarCursor(grammar := Pattern())
    grower = TreeGrower([cursor], SpecConfig(), Ranking(Calibration().probability))
    text = ""
    for piece in ('{"', 'name": "', "bob", '", "age": 12'):
        cursor.observe(committed(piece))
        text += piece
        grower.grow(0, 16)
    cursor.observe(committed(""))
    assert grammar.texts[-1] == text


def test_a_text_that_leaves_the_grammar_has_no_drafts_from_it():
    assert grown('{"nobody')[0] == ""

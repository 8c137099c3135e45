"""Hypothesis strategies: trees, candidate tables with the cursors that read them, and texts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from hypothesis import strategies as st

from selfspec.draft.sources import Cursor
from selfspec.records import Candidate, DraftTree, Evidence, StepRecord

ALPHABET = 5
_STEPS = 1000  # scripted probabilities are whole thousandths


def tree_of(parents: Sequence[int], tokens: Sequence[int] | None = None) -> DraftTree:
    """A tree of the given shape; its tokens default to the nodes' own numbers."""
    tokens = range(len(parents)) if tokens is None else tokens
    tree = DraftTree.of_root(tokens[0])
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        tree.add(parent, token, tree.scores[parent] * 0.5)
    return tree


def path_of(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """The nodes that carry these tokens, the root first, as far as there are such."""
    path = [0]
    for token in tokens:
        if token not in tree.children[path[-1]]:
            break
        path.append(tree.children[path[-1]][token])
    return path


def check_tree(tree: DraftTree) -> None:
    """Asserts every invariant."""
    assert (tree.parents[0], tree.depths[0]) == (-1, 0)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.children[parent].get(tree.tokens[node]) == node
        assert tree.scores[node] <= tree.scores[parent] + 1e-12
    assert sum(map(len, tree.children)) == len(tree) - 1


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 8, alphabet: int | None = None) -> DraftTree:
    """Any shape; with an `alphabet` random tokens too, different ones among siblings."""
    num_nodes = draw(st.integers(1, max_nodes))
    if alphabet is None:
        return tree_of([-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))])
    token = st.integers(0, alphabet - 1)
    tree = DraftTree.of_root(draw(token))
    for node in range(1, num_nodes):
        parent, carried = draw(st.integers(0, len(tree) - 1)), draw(token)
        if carried not in tree.children[parent]:
            tree.add(parent, carried, 0.5**node)
    return tree


@st.composite
def paths_down(draw: st.DrawFn, tree: DraftTree) -> list[int]:
    """The root and some of the nodes below it, each the child of the one before."""
    path = [0]
    while tree.children[path[-1]] and draw(st.booleans()):
        path.append(draw(st.sampled_from(list(tree.children[path[-1]].values()))))
    return path


@st.composite
def tables(draw: st.DrawFn, max_children: int = 3) -> dict[int, list[tuple[int, float]]]:
    """For each token of a small alphabet: what a source expects behind it, in any order."""
    token = st.integers(0, ALPHABET - 1)
    next_tokens = st.lists(token, max_size=max_children, unique=True)
    probability = st.integers(0, _STEPS).map(lambda step: step / _STEPS)
    return {
        last: [(each, draw(probability)) for each in draw(next_tokens)] for last in range(ALPHABET)
    }


# Whatever JSON can say, with what is rare among it.
any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["\ud800", "../x", 1 << 70, -1, 1e400]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | inner.map(lambda value: _deep(value))
    ),
    max_leaves=6,
)


def _deep(value: Any) -> Any:
    """A value inside of many lists, which is more than Python's own reader goes down at times."""
    for _ in range(200):
        value = [value]
    return value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of which some were flipped, cut out, cut off or put in."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(start + 9, len(data))))
        data = data[:start] + draw(st.binary(max_size=9)) + data[end:]
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


def texts(max_size: int = 30, alphabet: int = 3) -> st.SearchStrategy[list[int]]:
    """Token texts that repeat themselves, as few tokens are there to choose from."""
    return st.lists(st.integers(0, alphabet - 1), max_size=max_size)


def probability_of(kinds: Sequence[Evidence]) -> float:
    """Reads back what `ScriptedCursor`s wrote into their evidence, as independent signs."""
    return 1 - prod(1 - evidence.match_length / _STEPS for evidence in kinds)


class Named(NamedTuple):
    """A candidate, and the state of its cursor behind it."""

    token: int
    evidence: Evidence
    state: Any


def candidates_of(cursor: Any, state: Any) -> list[Named]:
    """What a cursor names behind a state, and how it goes on there."""
    return [Named(token, kind, cursor.follow(state, token)) for token, kind in cursor.expand(state)]


class ScriptedCursor(Cursor):
    """A source that reads its candidates off a table by the last token; counts its expansions."""

    def __init__(
        self,
        table: dict[int, list[tuple[int, float]]],
        root: int = 0,
        *,
        follows: bool = False,
        name: str = "scripted",
    ) -> None:
        self.name = name
        self.table = table
        self.last_token = root
        self.follows = follows
        self.num_expanded = 0

    def root(self) -> int:
        return self.last_token

    def expand(self, state: int) -> list[Candidate]:
        self.num_expanded += 1
        return [
            (token, Evidence(self.name, round(probability * _STEPS), rank))
            for rank, (token, probability) in enumerate(self.table.get(state, []), start=1)
        ]

    def follow(self, state: int, token: int) -> int | None:
        names = any(token == named for named, _ in self.table.get(state, []))
        return token if names or self.follows else None

    def observe(self, record: StepRecord) -> None:
        self.last_token = record.committed_ids[-1]

"""Self-Draft's branches are nodes of the tree and yield drafts, which its caches hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.config import SpecConfig
from selfspec.draft.ranking import Ranking
from selfspec.draft.sources import RowStart
from selfspec.draft.tree import TreeGrower
from selfspec.errors import ConfigError
from selfspec.papers import self_draft
from selfspec.papers.self_draft import Branches, ContextCache, ContextCacheCursor, CorpusCache
from selfspec.records import DraftTree, Pays, StepRecord, TopK
from tests.oracles import next_in_corpus
from tests.strategies import ScriptedCursor, check_tree, probability_of, texts

PROMPT = [11, 12, 13]
GUESSES = {0: [(7, 0.5), (1, 0.3)], 7: [(1, 0.8)]}


class Cache(ContextCacheCursor):
    """Keeps the drafts as they come."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.grams: list[tuple[int, ...]] = []

    def keep(self, gram: tuple[int, ...]) -> None:
        self.grams.append(gram)


def branches_of(*tokens: list[int], length: int = 4, gram_length: int = 2) -> Branches:
    """Branches that a test chooses."""
    branches = Branches(6, length, gram_length, fills=False).for_row(PROMPT, learns=True)
    branches.tokens = [list(branch) for branch in tokens]
    return branches


def grown(
    branches: Branches,
    cache: ContextCacheCursor,
    guesses: dict[int, list[tuple[int, float]]] | None = None,
    max_nodes: int = 60,
    max_depth: int = 9,
    pays: Pays | None = None,
) -> DraftTree:
    cursors = [ScriptedCursor(guesses or {}), cache]
    grower = TreeGrower(cursors, SpecConfig(), Ranking(probability_of), branches.grow)
    tree = grower.grow(0, max_nodes, max_depth, pays)
    check_tree(tree)
    return tree


def answer(branches: Branches, tree: DraftTree, answers: dict[int, int]) -> None:
    """A step in which the model answers each of some tokens, and the others with 0."""
    ids = np.array([[answers.get(token, 0)] for token in tree.tokens], np.int32)
    top = TopK(ids, np.ones(ids.shape, np.float16))
    branches.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[9], top=top))


def test_they_start_with_tokens_of_the_prompt_and_two_requests_draw_alike():
    shape = Branches(40, 6)
    starts = shape.for_row(PROMPT, learns=True).tokens
    assert all(len(branch) == 3 for branch in starts)
    assert {token for branch in starts for token in branch} == set(PROMPT)
    assert starts == shape.for_row(PROMPT, learns=True).tokens
    assert not shape.for_row([], learns=True).tokens
    assert not shape.for_row(PROMPT, learns=False).tokens
    assert shape.num_nodes == 240


@given(st.lists(st.lists(st.integers(1, 29), min_size=1, max_size=4), max_size=3))
def test_a_branch_is_a_chain_below_the_root_that_shares_what_is_there(tokens):
    alone = grown(branches_of(), Cache(), GUESSES)
    tree = grown(branches_of(*tokens), Cache(), GUESSES)
    assert tree.tokens[: len(alone)] == alone.tokens
    assert tree.parents[: len(alone)] == alone.parents
    assert not any(tree.scores[len(alone) :])
    for branch in tokens:
        node = 0
        for token in branch:
            node = tree.children[node][token]


def test_a_full_branch_yields_its_sub_sequences_with_their_successors():
    cache, branches = Cache(), branches_of([1, 2, 3, 4], [7, 8])
    answer(branches, grown(branches, cache), {token: token + 11 for token in range(9)})
    assert cache.grams == [(1, 2, 13), (2, 3, 14), (3, 4, 15)]
    assert branches.tokens == [[2, 3, 4, 15], [7, 8, 19]]  # A full one drops its first token.


def test_each_branch_takes_its_own_answers_even_from_nodes_that_it_shares():
    cache, branches = Cache(), branches_of([1, 2], [3, 4], length=2)
    tree = grown(branches, cache, GUESSES)
    assert len(tree) == 4 + 3
    answer(branches, tree, {1: 5, 2: 6, 4: 8})
    assert cache.grams == [(1, 2, 6), (3, 4, 8)]
    assert branches.tokens == [[2, 6], [4, 8]]


def test_what_does_not_fit_or_pay_or_was_cut_stays_as_it_is():
    def after(cut: int = 99, **limits) -> list[list[int]]:
        branches = branches_of([1, 2], [3, 4, 5], [6])
        tree = grown(branches, Cache(), **limits)
        tree.cut(cut)
        answer(branches, tree, {2: 7})
        return branches.tokens

    assert after(max_nodes=4) == [[1, 2, 7], [3, 4, 5], [6]]
    assert after(max_depth=2) == [[1, 2, 7], [3, 4, 5], [6, 0]]
    assert after(pays=lambda tree, _score: len(tree) < 3) == [[1, 2, 7], [3, 4, 5], [6]]
    assert after(cut=5) == [[1, 2, 7], [3, 4, 5], [6]]


def test_they_take_half_of_the_nodes_at_most():
    many = {0: [(token, 0.02) for token in range(10, 40)]}
    tree = grown(branches_of([1, 2], [3, 4]), Cache(), many, max_nodes=12)
    assert len(tree) == 6 + 4
    assert len(grown(branches_of(), Cache(), many, max_nodes=12)) == 12


@pytest.mark.parametrize("name", ["num_branches", "length", "gram_length"])
def test_numbers_are_checked(name):
    with pytest.raises(ConfigError, match=name):
        Branches(**{name: 0})


def committed(token: int) -> StepRecord:
    return StepRecord(row=0, tree=DraftTree.of_root(0), path=[0], committed_ids=[token])


def test_it_holds_the_freshest(monkeypatch) -> None:
    monkeypatch.setattr(self_draft, "_MAX_DRAFTS", 2)
    cursor = ContextCache().open(RowStart(prompt_ids=[1]))
    for gram in [(1, 5), (1, 6, 7), (2, 5), (1, 5), (1, 8)]:
        cursor.keep(gram)
    assert cursor.root() == [(8,), (5,)]
    cursor.observe(committed(2))
    assert cursor.root() == [(5,)]
    cursor.observe(committed(3))
    assert cursor.root() == []


def test_a_draft_is_followed_to_its_end():
    cursor = ContextCache().open(RowStart(prompt_ids=[1]))
    cursor.keep((5, 6, 7))
    cursor.keep((5, 8, 9))
    cursor.observe(committed(5))
    root = cursor.root()
    assert [(token, kind.rank) for token, kind in cursor.expand(root)] == [(8, 1), (6, 2)]
    below = cursor.follow(root, 6)
    assert [token for token, _ in cursor.expand(below)] == [7]
    assert cursor.follow(below, 7) is None
    assert cursor.follow(root, 4) is None


@settings(deadline=None)
@given(
    st.lists(texts(max_size=20, alphabet=5), max_size=4),
    texts(max_size=6, alphabet=6),
    texts(max_size=6, alphabet=6),
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(1, 4),
)
def test_candidates_are_those_of_a_full_search(corpus, text, more, max_prefix, min_count, top_k):
    """The longest prefix first, then the more frequent token, each once, at most K."""
    source = CorpusCache(corpus, max_prefix=max_prefix, min_count=min_count, top_k=top_k)
    lengths: dict[int, int] = {}
    end = [*text, *more]
    for length in range(min(max_prefix, len(end)), 0, -1):
        for token in next_in_corpus(corpus, end[-length:], min_count)[:top_k]:
            lengths.setdefault(token, length)
    cursor = source.open(RowStart(prompt_ids=text))
    state = cursor.root()
    for token in more:
        state = cursor.follow(state, token)
    found = [(token, evidence.match_length) for token, evidence in cursor.expand(state)]
    assert found == list(lengths.items())[:top_k]
    step = StepRecord(row=0, tree=DraftTree.of_root(0), path=[0], committed_ids=more)
    cursor.observe(step)
    assert cursor.root() == state

"""The corpus cache equals a full search, however its end was reached."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.draft.sources import RowStart
from selfspec.papers.self_draft import CorpusCache
from selfspec.records import DraftTree, StepRecord
from tests.oracles import next_in_corpus
from tests.strategies import texts


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

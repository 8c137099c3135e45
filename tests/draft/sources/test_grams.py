"""N-gram queues equal a plain dict of lists, whatever is added, and never outgrow their bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from selfspec.draft.sources.grams import GramQueues

MAX_KEYS, MAX_GRAMS = 3, 4


@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=4), max_size=40))
def test_queues_hold_the_freshest(grams: list[list[int]]) -> None:
    queues = GramQueues(max_keys=MAX_KEYS, max_grams=MAX_GRAMS)
    plain: dict[int, list[tuple[int, ...]]] = {}
    for gram in grams:
        queues.add(gram)
        key, tail = gram[0], tuple(gram[1:])
        held = [tail, *(other for other in plain.pop(key, []) if other != tail)]
        plain[key] = held[:MAX_GRAMS]  # now the last of the dict: the freshest key
        if len(plain) > MAX_KEYS:
            del plain[next(iter(plain))]
        assert [queues.behind(token) for token in range(6)] == [
            plain.get(token, []) for token in range(6)
        ]

"""Chains against a dictionary of n-grams, and what caches teach them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given

from selfspec.engines import chains as chains_
from selfspec.engines.chains import LONGEST, Chains, windows
from tests.caches import TEXT, VOCAB_SIZE, count_grams
from tests.strategies import texts

LENGTHS = chains_._LENGTHS.tolist()


class Plain:
    """The rule that a table of n-grams keeps: a token gives way when others came as often."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, ...], list[int]] = {}

    def add(self, text: Sequence[int], token: int) -> None:
        for key in {tuple(text[-length:]) for length in LENGTHS}:
            now = self.found.setdefault(key, [token, 0])
            if now[0] == token:
                now[1] += 1
            elif now[1] > 1:
                now[1] //= 2
            else:
                now[:] = token, 1

    def named(self, text: Sequence[int]) -> int:
        for length in reversed(LENGTHS):
            if (found := self.found.get(tuple(text[-length:]))) is not None:
                return found[0]
        return -1


def before(text: Sequence[int]) -> np.ndarray:
    return windows(np.array([text]), np.zeros(1, int), np.array([len(text)]), LONGEST)


def write(chains: Chains, text: list[int], token: int, serial: int = 1) -> None:
    chains.observe(before(text), np.array([token]), np.array([serial]))
    text.append(token)


def draft(chains: Chains, text: Sequence[int], serial: int = 1, limit: int = 8) -> list[int]:
    (chain,) = chains.draft(before(text), np.array([serial]), np.array([limit]))
    return chain


@given(texts(), texts())
def test_it_names_what_a_dictionary_does(first: Sequence[int], second: Sequence[int]):
    chains, all_ = Chains(4, 0.0, VOCAB_SIZE), Plain()
    for serial, tokens in enumerate((first, second), start=1):
        text, own = [3], Plain()
        for token in tokens:
            own.add(text, token)
            all_.add(text, token)
            write(chains, text, token, serial)
            draft(chains, text, serial)
            named, _ = chains._looked[0]
            assert named.tolist() == [[own.named(text), all_.named(text)]]


def test_a_prompt_is_drafted_from_by_its_own_row_alone():
    chains = Chains(8, 0.0, VOCAB_SIZE)
    chains.read(np.array([1, 2, 3, 4]), 1)
    assert draft(chains, [9, 2], 1) == [3, 4]
    assert draft(chains, [9, 2], 2) == []


def test_rows_are_drafted_for_together_as_alone():
    chains = Chains(8, 0.0, VOCAB_SIZE)
    rows = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 5], [8]]
    for serial, text in enumerate(rows, start=1):
        chains.read(np.array(text), serial)
    alone = [draft(chains, text, serial) for serial, text in enumerate(rows, start=1)]
    windows_ = np.concatenate([before(text) for text in rows])
    together = chains.draft(windows_, np.arange(1, 4), np.array([8, 8, 8]))
    assert together == alone
    assert [chain[:2] for chain in alone] == [[3, 4], [6, 7], []]


def test_tokens_beyond_the_vocabulary_are_read_but_not_drafted():
    chains = Chains(8, 0.0, VOCAB_SIZE)
    chains.read(np.array([1, 2, VOCAB_SIZE, 4, 5]), 1)
    assert draft(chains, [1]) == [2]
    assert draft(chains, [2, VOCAB_SIZE]) == [4, 5]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_chain_keeps_its_limit(limit: int):
    chains = Chains(8, 0.0, VOCAB_SIZE)
    chains.read(np.array([1, 2, 3, 4, 5, 6, 1]), 1)
    assert draft(chains, [1], limit=limit) == [2, 3, 4][:limit]


def test_what_never_comes_true_is_no_longer_drafted():
    chains, none = Chains(8, 0.2, VOCAB_SIZE), np.array([-1])
    chains.read(np.array([1, 2, 3]), 1)
    assert draft(chains, [1])
    chains.count(none, np.array([0]), np.array([7]))  # It was not in the last step.
    assert draft(chains, [1])
    for _ in range(30):
        draft(chains, [1])
        chains.count(np.array([0]), np.array([0]), np.array([7]))
    assert draft(chains, [1]) == []


def test_a_corpus_is_drafted_from():
    chains = Chains(8, 0.0, VOCAB_SIZE)
    chains.read_corpus(count_grams(TEXT))
    assert draft(chains, [9]) != []
    assert draft(chains, [9])[0] == 2
    assert draft(chains, [3, 1])[:2] == [4, 1]


def test_a_table_is_drafted_from_where_it_holds_something():
    chains = Chains(1, 0.0, VOCAB_SIZE)
    pairs, ids = np.array([[1, 2], [3, 4]]), np.array([5, -1])
    chains.read_table(pairs, ids, np.array([0.5, 0.0], np.float16))
    assert draft(chains, [1, 2]) == [5]
    assert draft(chains, [3, 4]) == []
    assert draft(chains, [2]) == []

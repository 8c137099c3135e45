"""Evidence by halvings of a stored probability."""

from __future__ import annotations

import numpy as np

from selfspec.draft.sources.bins import MANTISSA_BITS, evidence_table


def exponents_of(probabilities: np.ndarray) -> list[int]:
    return (probabilities.view(np.uint16) >> MANTISSA_BITS).tolist()


def test_every_stored_probability_has_its_evidence():
    """All 65,536 patterns of an fp16, those that are no probability among them."""
    table = evidence_table("x", 2)
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for exponent in set(exponents_of(patterns)):
        assert 0 <= table[1][exponent].probability_bin <= 14


def test_the_table_tells_ranks_and_bins_apart():
    table = evidence_table("x", 3)
    exponents = exponents_of(np.array([1, 0.5, 0.25, 0.2, 1e-7, 0], np.float16))
    kinds = [table[1][exponent] for exponent in exponents]
    assert [kind.probability_bin for kind in kinds] == [0, 0, 1, 2, 6, 6]
    assert {(kind.source, kind.rank) for kind in kinds} == {("x", 2)}

"""Recorded probabilities as evidence: bins by powers of two, read off the bits of an fp16.

Few bins on purpose: each kind of evidence, and each way in which kinds meet, has a rate of its
own to be counted, and what is split too finely is never counted enough.
"""

from __future__ import annotations

from selfspec.records import Evidence

__all__ = ["MANTISSA_BITS", "evidence_table"]

# An fp16 has 10 bits of mantissa, then the exponent.
MANTISSA_BITS = 10

# The exponent of p in [0.5, 1) is 14. Each halving has one less, and 1.0 itself one more.
_TOP_EXPONENT = 14
# Everything less likely than 1 in 64 shares the last bin.
_MAX_BIN = 6


def evidence_table(source: str, top_k: int) -> list[list[Evidence]]:
    """Every evidence that a recorded top-K can give, made once: [rank - 1][stored exponent].

    A stored exponent are the bits of an fp16 above its mantissa: 0 to 15 for a probability, and up
    to 63 for what is none.
    """
    bins = [min(max(_TOP_EXPONENT - exponent, 0), _MAX_BIN) for exponent in range(16)]
    bins += [_MAX_BIN] * 48  # A NaN or a negative number counts as very unlikely.
    return [
        [Evidence(source, rank=rank, probability_bin=bin_) for bin_ in bins]
        for rank in range(1, top_k + 1)
    ]

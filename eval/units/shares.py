"""How much of each linear layer the first unit gets, found by profiling both units.

A unit is slower while the other one works, since they share memory and its bus. Ghidorah therefore
profiles each unit under this contention. Profiles of an idle machine give another split.
"""

from __future__ import annotations

import torch

from eval.units.layer import KINDS, Layer, Shared
from eval.units.unit import Pair

_ROUNDS = 10
_REFINEMENTS = 2  # Times depend on the split itself, so a found split is profiled again.


def even(share: float = 0.5) -> dict[str, float]:
    """The same share of each kind."""
    return dict.fromkeys(KINDS, share)


def profiled(layer: Layer, units: Pair, width: int, *, together: bool) -> dict[str, float]:
    """The shares at which both units should end at the same time.

    Units are profiled `together`, each while the other one works, or one after the other.
    """
    shares = even()
    for _ in range(_REFINEMENTS if together else 1):
        shared = Shared(layer, units, shares)
        for kind in KINDS:
            x = torch.ones(width, layer.weights[kind][0].shape[1])
            first, second = shared.tasks(kind, x)
            if first is None or second is None:
                continue  # One unit is so slow that it got no column.
            timed = units.seconds_together if together else units.seconds_alone
            shares[kind] = _balanced(shares[kind], *timed(first, second, _ROUNDS))
    return shares


def _balanced(share: float, first_seconds: float, second_seconds: float) -> float:
    """The share at which both would take equally long, at the speeds that they just had.

    >>> _balanced(0.5, 1.0, 3.0)
    0.75
    """
    first, second = share / first_seconds, (1 - share) / second_seconds
    return first / (first + second)

"""Curves belong to what a cost depends on, start from the nearest thing known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eval.runs.timing import learned_curve
from selfspec.cost import CostCurve
from selfspec.forward.costs import Costs
from tests.fakes import new_model

pytestmark = pytest.mark.usefixtures("measuring")


def backend(tree_start: int = 20, kind: str = "eager") -> Any:
    return SimpleNamespace(
        kv=SimpleNamespace(tree_start=tree_start), forward_name=kind, chains_only=False
    )


def teach(curve: CostCurve, slope: float) -> None:
    for width in (1, 2, 4, 8) * 20:
        curve.refine(width, 1 + slope * (width - 1))


def test_the_same_situation_has_the_same_curve():
    costs, model = Costs(), new_model()
    curve = costs.curve(model, backend(), 1)
    assert costs.curve(model, backend(tree_start=200), 1) is curve
    assert costs.curve(model, backend(tree_start=300), 1) is not curve
    assert costs.curve(model, backend(), 3) is not curve
    assert costs.curve(model, backend(kind="packed"), 1) is not curve


def test_a_new_length_starts_from_the_nearest_known_one():
    costs, model = Costs(), new_model()
    short, long = (
        costs.curve(model, backend(tree_start=tree_start), 1) for tree_start in (20, 3000)
    )
    teach(short, 0.5)
    teach(long, 0.1)
    assert costs.curve(model, backend(tree_start=300), 1).table(8) == short.table(8)
    assert costs.curve(model, backend(tree_start=1500), 1).table(8) == long.table(8)


def test_what_calls_with_one_row_have_learned():
    costs, model = Costs(), new_model()
    assert learned_curve(costs, "eager", 600) is None
    curve = costs.curve(model, backend(), 1)
    assert learned_curve(costs, "eager", 600) is None
    teach(curve, 0.3)
    costs.curve(model, backend(tree_start=600), 1)  # Nothing was timed at this length.
    teach(costs.curve(model, backend(tree_start=600), 2), 0.1)
    assert learned_curve(costs, "eager", 600) is curve
    assert learned_curve(costs, "packed", 600) is None

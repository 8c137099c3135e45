"""EdgeLLM: whose turn it is, when drafting ends, and how the threshold α moves."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.config import SpecConfig
from selfspec.cost import StepTime
from selfspec.draft.ranking import Ranking
from selfspec.draft.shape import Shape
from selfspec.draft.sources import RowStart
from selfspec.draft.tree import TreeGrower
from selfspec.papers.diaa import recorded
from selfspec.papers.edgellm import DraftLLM, Fallback, Pacer, confidence
from selfspec.records import DraftTree, StepRecord
from tests.fakes import VOCAB, new_model
from tests.strategies import ScriptedCursor, probability_of

TOOK = StepTime(4, 0.0, 1.0)
CHANCES = (0.6, 0.2, 0.1)
BEHIND = {n: [(n + i, chance) for i, chance in enumerate(CHANCES, 1)] for n in range(40)}


def grown(shape: Shape, max_nodes: int, budget: Fallback | None = None) -> DraftTree:
    """Behind token n come n + 1, n + 2 and n + 3."""
    grower = TreeGrower([ScriptedCursor(BEHIND)], SpecConfig(), Ranking(probability_of), shape.grow)
    pays = None if budget is None else budget.step(max_nodes).search()
    with mock.patch("selfspec.draft.tree._LEAST_HOPE", 1.0):
        return grower.grow(0, max_nodes, pays=pays)


def test_the_pacer_goes_on_with_the_branch_that_lacks_most_of_its_tokens():
    best = sum(grown(Shape(), 7).scores[1:])
    paced = grown(Pacer(6), 7)
    assert sum(paced.scores[1:]) < best
    assert len(paced.children[0]) > 1


def test_equation_3():
    budget = Fallback(0.08)
    budget.observe(4, 4, 0.3)
    assert budget.alpha == pytest.approx(0.04)
    budget.observe(4, 1, 0.25)
    assert budget.alpha == pytest.approx(0.04 / 0.25**0.75)
    budget.observe(0, 0, 1.0)
    assert budget.alpha == pytest.approx(0.04 / 0.25**0.75)


@given(
    st.floats(0.001, 0.99),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.floats(0, 1)), max_size=60),
)
def test_alpha_stays_between_0_and_1(start, paths):
    budget = Fallback(start)
    for num_all, num_correct, held in paths:
        before = budget.alpha
        budget.observe(num_all, min(num_correct, num_all), held)
        assert 0 < budget.alpha < 1
        if 0 < num_all <= num_correct:
            assert budget.alpha <= before
        else:
            assert budget.alpha >= before


def test_the_branch_that_was_right_longest_is_judged():
    """The first branch has the best leaf, the second one the most right tokens."""
    tree = DraftTree.of_root(1)
    tree.add(0, 2, 0.6)
    tree.add(0, 3, 0.3)
    tree.add(2, 4, 0.2)
    assert confidence(tree) == 0.6
    budget = Fallback()
    record = StepRecord(row=0, tree=tree, path=[0, 2, 3], committed_ids=[3, 4, 5])
    budget.step(8).observe(TOOK, [record])
    assert budget.alpha == pytest.approx(0.005)


def test_chances_are_the_draft_llms_own_probabilities():
    model = new_model()
    cursor = DraftLLM(model, num_ids=VOCAB, top_k=3).open(RowStart(prompt_ids=[3, 4]))
    cursor.prepare()
    cursor.read((), 1.0)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 4]])).logits[0, -1].softmax(-1).topk(3)
    named = cursor.expand(())
    assert [token for token, _ in named] == expected.indices.tolist()
    assert [recorded(kind) for _, kind in named] == pytest.approx(
        expected.values.tolist(), abs=1e-3
    )

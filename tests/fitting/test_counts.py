"""What is counted of a step, and what rates are made of few counts."""

from __future__ import annotations

import pytest

from selfspec.config import SpecConfig
from selfspec.fitting import AcceptanceCounts
from selfspec.records import DraftTree, Siblings, StepRecord
from tests.scripted import Run, ScriptedModel, doubtful, hostile


def test_a_step_is_counted_as_far_as_candidates_were_looked_at():
    """The root's second candidate comes true, its child is none of those named; 9 got no node."""
    tree = DraftTree.of_root(1)
    tree.looked_at[0] = Siblings([7, 8, 9], [0.5, 0.3, 0.1], [(), (), ()])
    for token in (7, 8):
        tree.add(0, token, 0.3)
    tree.looked_at[2] = Siblings([4], [0.5], [()])
    counts = AcceptanceCounts()
    counts.observe(StepRecord(row=0, tree=tree, path=[0, 2], committed_ids=[8, 5]))
    counts.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[9]))  # without a node
    counts.observe(StepRecord(row=0, tree=tree, path=[0, 1], committed_ids=[7, 3]))  # a leaf
    counts.observe(StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[7]))
    assert counts.trials == {(): 3, (1,): 1}
    assert counts.hits == {(1,): 1, (2,): 1, (0,): 1}


def test_counts_of_a_scripted_model():
    """One source names the truth first or second wherever it is asked, the other one never."""
    model = ScriptedModel(seed=1)
    for source, is_right in ((doubtful, True), (hostile, False)):
        config = SpecConfig(max_nodes=7, max_depth=2)
        run = Run(model, [[1, 2, 3]], [source(model)], config=config)
        run.decode()
        counts = AcceptanceCounts()
        for record in run.records:
            counts.observe(record)
        assert counts.trials[()] == sum(len(record.tree) > 1 for record in run.records) > 2
        assert counts.hits.total() == (counts.trials.total() if is_right else 0)
        assert {rank for path in counts.hits for rank in path} <= {0, 1}
        accepted = sum(len(record.path) - 1 for record in run.records)
        assert counts.hits.total() == accepted


def test_a_level_with_few_trials_leans_on_the_one_above():
    counts = AcceptanceCounts()
    counts.trials.update({(): 100, (0,): 8})
    counts.hits.update({(0,): 50, (1,): 10, (0, 1): 8})
    levels = counts.rates(3)
    assert levels[0] == [0.5, 0.1]
    assert levels[1] == pytest.approx([0.25, 0.55])  # 0 and 8 of 8, and as many trials as above
    assert levels[2] == levels[1]
    assert counts.rates_behind((1,), levels[1]) == pytest.approx(levels[1])
    assert counts.rates_behind((0,), levels[1]) == pytest.approx([0.125, 0.775])
    assert AcceptanceCounts().rates(2) == [[], []]

"""The published methods, how questions are put, and when a text counts as stock's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eval.command import main
from eval.methods.lookahead import Window
from eval.methods.method import Resources
from eval.methods.names import DESCRIPTIONS
from eval.methods.published import FIXED_NODES, PUBLISHED
from eval.methods.registry import METHODS, new_method
from eval.papers.ghidorah import FittedTree
from eval.papers.self_draft import ContextCacheCursor
from eval.runs.sameness import MAX_ULPS, Verdict, compare
from eval.runs.timing import timed
from selfspec import SpecConfig, attach
from selfspec.compat.heads import RUNS_HEADS
from selfspec.config import SOURCE_NAMES
from selfspec.draft.ranking import Ranking
from selfspec.draft.tree import TreeGrower
from selfspec.records import StepRecord, TopK
from tests.fakes import new_model, prompt, tiny_model
from tests.heads import model_with_heads
from tests.strategies import probability_of

ASKED = {"max_new_tokens": 24, "temperature": 0.0, "seed": 0}
STOCKS_OWN = ("stock", "stock-padded", "prompt-lookup", "forward-only", "selfspec", "assisted")


def ids() -> torch.Tensor:
    return prompt()["input_ids"]


@pytest.mark.parametrize("name", STOCKS_OWN)
def test_a_method_answers_as_stock_does_and_its_prompts_forward_is_timed(name):
    model = attach(new_model())
    method = new_method(name, Resources(assistant=new_model(num_hidden_layers=1)))
    assert (method.name, method.refusal(model)) == (name, None)
    result = timed(model, lambda one: method.answer(model, ids(), streamer=one, **ASKED))
    assert torch.equal(result.output, new_method("stock").answer(model, ids(), **ASKED))
    assert 0 < result.prefill_seconds < result.seconds
    if name == "forward-only":
        assert (method.stats.tokens_per_step, method.stats.nodes_per_step) == (1, 1)


def test_heads_take_part_where_a_model_has_some():
    method = new_method("mtp")
    assert "names no heads" in method.refusal(new_model())
    if RUNS_HEADS:
        assert method.refusal(model_with_heads()) is None


def test_each_method_is_described(capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "--methods", "list"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code in (None, 0)
    assert [line.split()[0] for line in lines] == list(DESCRIPTIONS)
    assert set(DESCRIPTIONS) == set(METHODS)


SOURCES = {
    "diaa": {"lut"},
    "token-recycling": {"lut"},
    "lut-tree": {"lut"},
    "self-draft": {"grams", "corpus"},
    "suffix-branches": {"context", "grams"},
    "selfspec-branches": {*SOURCE_NAMES, "grams"},
    "selfspec-intervals": set(SOURCE_NAMES),
    "ghidorah": set(SOURCE_NAMES),
    "suffix": {"context", "answers"},
    "rest": {"answers"},
    "lookahead": {"grams"},
    "edgellm": {"draft model"},
    "sam": {"match", "tree"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_method_gives_stocks_text_with_sources_and_a_width_of_its_own(name):
    """What is not counted by the paper's method is not counted here: only tables are learned."""
    asked = {**ASKED, "temperature": 0.8}
    given = Resources(
        config=SpecConfig(max_nodes=24),
        tree=FittedTree((0, 0, 1), (0, 2, 1), (0.6, 0.2, 0.1)) if name == "ghidorah" else None,
        assistant=new_model(num_hidden_layers=1),
        datastore=[ids()[0].tolist() * 3],
    )
    method = new_method(name, given)
    expected = new_method("stock").answer(attach(tiny_model()), ids(), **asked)
    assert torch.equal(method.answer(attach(tiny_model()), ids(), **asked), expected)
    assert method.stats.disabled_reason is None
    assert method.spec.config.budget == "fixed"
    widths = {"token-recycling": FIXED_NODES, "edgellm": 25, "lookahead": 121}
    has_branches = "branches" in name or name == "self-draft"
    assert method.spec.config.max_nodes == widths.get(name, 24 + 36 * has_branches)
    assert set(method.stats.drafted_by_source) <= SOURCES[name]
    rates = method.spec.learned(attach(tiny_model()).config.vocab_size).calibration.rows()
    assert bool(rates) == (name in ("sam", "ghidorah", "suffix") or name.startswith("selfspec"))
    first = method.stats.num_steps
    method.forget()
    method.answer(attach(tiny_model()), ids(), **asked)
    assert method.stats.num_steps == first


def test_verdicts():
    model = attach(new_model())
    likeliest = int(model(torch.tensor([[5, 6]])).logits[0, -1].argmax())
    other = (likeliest + 1) % 40
    same = compare(model, [5, 6], [likeliest, 3], [likeliest, 3], greedy=True)
    assert same == Verdict("identical")
    found = compare(model, [5, 6], [likeliest, 3], [other, 3], greedy=True)
    assert (found.same, found.differs_at) == ("different", 0)
    assert found.gap_ulps > MAX_ULPS
    assert compare(model, [5, 6], [3], [4], greedy=False) == Verdict("different", 0)
    assert compare(model, [5, 6], [3], [3, 4], greedy=True) == Verdict("different", 1)
    head = model.lm_head.weight.data
    head[other] = head[likeliest]
    tie = compare(model, [5, 6], [likeliest], [other], greedy=True)
    assert tie == Verdict("near-tie", 0, 0.0)


def test_a_datastore_drafts_what_it_holds_and_learns_nothing():
    text = new_method("stock").answer(attach(tiny_model()), ids(), **ASKED)[0].tolist()
    steps = []
    for store in ([[1, 2, 3]], [text]):
        method = new_method("rest", Resources(datastore=store))
        for _ in range(2):
            method.answer(attach(tiny_model()), ids(), **ASKED)
            steps.append(method.stats.num_steps)
    assert steps[0] == steps[1] == 23
    assert steps[2] == steps[3] < 6


def test_a_window_makes_n_grams_of_what_the_model_answers_step_by_step():
    """Each column is a text that the model has written from its first token on, level by level."""
    window = Window(width=2, length=3, guesses=1).for_row([7], learns=True)
    cache, answers = ContextCacheCursor(7), {7: 8, 8: 9, 9: 4}
    grower = TreeGrower([cache], SpecConfig(), Ranking(probability_of), window.grow)
    for _ in range(3):
        tree = grower.grow(0, 60, 9, None)
        ids = np.array([[answers.get(token, 0)] for token in tree.tokens], np.int32)
        top = TopK(ids, np.ones(ids.shape, np.float16))
        window.observe(StepRecord(row=0, tree=tree, path=[0], committed_ids=[5], top=top))
    assert window._levels == [[9, 9], [4, 4]]
    assert cache._drafts == {7: [(8, 9)], 8: [(9, 4)]}

"""The published methods, how questions are put, and when a text counts as stock's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eval.methods.method import Resources
from eval.methods.published import FIXED_NODES, PUBLISHED, fixed_shape
from eval.methods.registry import new_method
from eval.methods.sameness import MAX_ULPS, Verdict, compare
from eval.methods.switch import SwitchSource
from eval.methods.timing import timed
from selfspec import SelfSpec, SpecConfig, attach
from selfspec.config import SOURCE_NAMES
from selfspec.draft.sources import RowStart
from selfspec.papers.ghidorah import FittedTree
from selfspec.records import TopK
from tests.fakes import new_model, prompt, tiny_model
from tests.recorder import use_recorders
from tests.tiny import make_tokenizer

ASKED = {"max_new_tokens": 24, "temperature": 0.0, "seed": 0}
STOCKS_OWN = ("stock", "stock-padded", "prompt-lookup", "forward-only", "selfspec", "assisted")


def ids() -> torch.Tensor:
    return prompt()["input_ids"]


@pytest.mark.parametrize("name", STOCKS_OWN)
def test_a_method_answers_as_stock_does_and_its_prompts_forward_is_timed(name):
    model = new_model()
    method = new_method(name, Resources(assistant=new_model(num_hidden_layers=1)))
    assert (method.name, method.refusal(model)) == (name, None)
    result = timed(model, lambda: method.answer(model, ids(), **ASKED))
    assert torch.equal(result.output, new_method("stock").answer(model, ids(), **ASKED))
    assert 0 < result.prefill_seconds < result.seconds


def test_forward_only_drafts_nothing():
    method = new_method("forward-only", Resources(config=SpecConfig(max_nodes=8)))
    method.answer(tiny_model(), ids(), **ASKED)
    assert (method.stats.tokens_per_step, method.stats.nodes_per_step) == (1, 1)
    assert method.stats.disabled_reason is None


def test_a_call_that_is_timed_is_captured_as_others_are(monkeypatch: pytest.MonkeyPatch):
    log = use_recorders(monkeypatch)
    model, method = new_model(), new_method("selfspec")
    for _ in range(3):
        timed(model, lambda: method.answer(model, ids(), **ASKED))
        assert method.stats.forward == "graph"
    assert "replay" in log


@pytest.mark.gpu
def test_on_a_gpu_the_static_cache_answers_and_prefill_is_told_apart():
    model = new_model().to("cuda")
    static, stock = new_method("stock-static"), new_method("stock")
    assert static.refusal(model) is None
    result = timed(model, lambda: stock.answer(model, ids().cuda(), **ASKED))
    assert torch.equal(static.answer(model, ids().cuda(), **ASKED), result.output)
    assert 0 < result.prefill_seconds < result.seconds


SOURCES = {
    "diaa": {"lut"},
    "diaa-merging": {"lut"},
    "lut-static": {"lut"},
    "lut-tree": {"lut"},
    "self-draft": {"grams", "corpus"},
    "suffix-branches": {"context", "grams"},
    "selfspec-branches": {*SOURCE_NAMES, "grams"},
    "selfspec-intervals": set(SOURCE_NAMES),
    "ghidorah": set(SOURCE_NAMES),
    "edgellm": {"draft model"},
    "switch": {"match", "tree"},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", SOURCES)
def test_a_published_method_gives_stocks_text_with_sources_and_a_width_of_its_own(
    name, temperature
):
    """What is not counted by the paper's method is not counted here: only tables are learned."""
    asked = {**ASKED, "temperature": temperature}
    given = Resources(
        config=SpecConfig(max_nodes=24),
        tree=FittedTree((0, 0, 1), (0, 2, 1), (0.6, 0.2, 0.1)) if name == "ghidorah" else None,
        assistant=new_model(num_hidden_layers=1),
    )
    method = new_method(name, given)
    expected = new_method("stock").answer(tiny_model(), ids(), **asked)
    assert torch.equal(method.answer(tiny_model(), ids(), **asked), expected)
    assert method.stats.disabled_reason is None
    assert method.spec.config.budget == "fixed"
    widths = {"lut-static": FIXED_NODES, "edgellm": 25}
    has_branches = "branches" in name or name == "self-draft"
    assert method.spec.config.max_nodes == widths.get(name, 24 + 36 * has_branches)
    assert set(method.stats.drafted_by_source) <= SOURCES[name]
    rates = method.spec.learned(tiny_model().config.vocab_size).calibration.rows()
    assert bool(rates) == (name in ("switch", "ghidorah") or name.startswith("selfspec"))
    first = method.stats.num_steps
    method.forget()
    method.answer(tiny_model(), ids(), **asked)
    assert method.stats.num_steps == first


def test_each_published_method_is_tried():
    assert set(SOURCES) == set(PUBLISHED)


def paths_of(tree) -> set[tuple[int, ...]]:
    """Every drafted node of a tree by the ranks that lead to it."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        (evidence,) = tree.evidence[node]
        paths.append((*paths[tree.parents[node]], evidence.rank))
    return set(paths[1:])


def test_the_static_tree_has_80_nodes_below_its_root_whatever_is_asked():
    method = new_method("lut-static", Resources(config=SpecConfig(max_nodes=4)))
    trees: list = []
    with method.spec.listening(lambda record: trees.append(paths_of(record.tree))):
        for seed in range(3):
            method.answer(tiny_model(), prompt(seed=seed)["input_ids"], **ASKED)
    shape: list[tuple[int, ...]] = [()]
    for parent, rank in fixed_shape().places():
        shape.append((*shape[parent], rank + 1))
    assert len(set(shape)) - 1 == FIXED_NODES - 1 == 80
    assert max(map(len, trees)) > 40
    assert all(tree <= set(shape) for tree in trees)  # less where the LUT has no row yet


def test_a_published_method_starts_with_the_cache():
    """Known beforehand: there is a LUT already."""
    model = tiny_model()
    taught = SelfSpec(sources=("lut",))
    ids_ = ids()
    attach(model).generate(ids_, assistant=taught, max_new_tokens=24, do_sample=False)
    warm = Resources(contents=taught.contents(tokenizer=make_tokenizer()))
    for name in ("lut-tree", "diaa"):
        steps = {}
        for state, given in (("cold", Resources()), ("prebuilt", warm)):
            method = new_method(name, given)
            method.answer(model, ids_, **ASKED)
            steps[state] = method.stats.num_steps
        assert steps["prebuilt"] < steps["cold"]


def test_the_switch_copies_a_long_match_and_else_asks_the_lut():
    span = [1, 2, 3, 4, 5, 6, 7]
    source = SwitchSource(2)
    top = TopK(np.array([[9, 8]]), np.array([[0.5, 0.3]], np.float16))
    source.observe_pairs(np.array([[-1, 5]]), top)
    long = source.open(RowStart(prompt_ids=[*span, 0, *span[:5]]))
    assert [(token, kind.source) for token, kind in long.expand(long.root())] == [(6, "match")]
    short = source.open(RowStart(prompt_ids=[*span, 0, 5]))
    assert [(token, kind.rank) for token, kind in short.expand(short.root())] == [(9, 1), (8, 2)]


def verdict(stock: list[int], other: list[int], *, greedy: bool = True) -> Verdict:
    return compare(new_model(), [5, 6], stock, other, greedy=greedy)


def test_verdicts():
    likeliest = int(new_model()(torch.tensor([[5, 6]])).logits[0, -1].argmax())
    other = (likeliest + 1) % 40
    assert verdict([likeliest, 3], [likeliest, 3]) == Verdict("identical")
    found = verdict([likeliest, 3], [other, 3])
    assert (found.same, found.differs_at) == ("different", 0)
    assert found.gap_ulps is not None
    assert found.gap_ulps > MAX_ULPS
    assert verdict([3], [4], greedy=False) == Verdict("different", 0)
    twins = new_model()
    head = twins.lm_head.weight.data
    head[other] = head[likeliest]
    tie = compare(twins, [5, 6], [likeliest], [other], greedy=True)
    assert tie == Verdict("near-tie", 0, 0.0)
    assert verdict([3], [3, 4]) == Verdict("different", 1)

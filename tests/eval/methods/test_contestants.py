"""The contestants: each answers through stock's generate(), with sources and rules of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eval.methods.diaa import DiaaSource, MergingSource, RecordedProbabilities
from eval.methods.method import Resources
from eval.methods.published import FIXED_NODES, PUBLISHED
from eval.methods.registry import new_method
from eval.methods.sameness import MAX_ULPS, Verdict, compare
from eval.methods.self_draft import RandomStarts
from eval.methods.switch import SwitchSource
from eval.methods.timing import timed
from selfspec import SelfSpec, SpecConfig, attach
from selfspec.records import TopK
from tests.fakes import new_model, prompt, tiny_model
from tests.recorder import use_recorders
from tests.tiny import make_tokenizer

ASKED = {"max_new_tokens": 24, "temperature": 0.0, "seed": 0}
STOCKS_OWN = ("stock", "stock-padded", "prompt-lookup", "forward-only", "selfspec", "assisted")


def ids(seed: int = 0) -> torch.Tensor:
    return prompt(seed=seed)["input_ids"]


@pytest.mark.parametrize("name", STOCKS_OWN)
def test_a_method_answers_as_stock_does_and_its_prompts_forward_is_timed(name):
    model = new_model()
    method = new_method(name, Resources(assistant=new_model(num_hidden_layers=1)))
    assert (method.name, method.refusal(model)) == (name, None)
    result = timed(model, lambda: method.answer(model, ids(), **ASKED))
    assert torch.equal(result.output, new_method("stock").answer(model, ids(), **ASKED))
    assert 0 < result.prefill_seconds < result.seconds


@pytest.mark.parametrize("budget", ["measured", "fitted"])
def test_forward_only_drafts_nothing_and_needs_no_fitted_tree(budget):
    config = SpecConfig(max_nodes=8, num_branches=2, budget=budget)
    method = new_method("forward-only", Resources(config=config))
    method.answer(tiny_model(), ids(), **ASKED)
    assert (method.stats.tokens_per_step, method.stats.queries_per_step) == (1, 1)
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
    "switch": {"match", "tree"},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_method_gives_stocks_text_with_sources_and_a_width_of_its_own(
    name, temperature
):
    """What is not counted by the paper's method is not counted here: only tables are learned."""
    asked = {**ASKED, "temperature": temperature}
    method = new_method(name, Resources(config=SpecConfig(max_nodes=24)))
    expected = new_method("stock").answer(tiny_model(), ids(), **asked)
    assert torch.equal(method.answer(tiny_model(), ids(), **asked), expected)
    assert method.stats.disabled_reason is None
    assert method.spec.config.budget == "fixed"
    assert method.spec.config.max_nodes == (FIXED_NODES if name == "lut-static" else 24)
    assert set(method.stats.drafted_by_source) <= SOURCES[name]
    assert (method.stats.num_branch_queries > 0) == ("branches" in name or name == "self-draft")
    rates = method.spec.memory(tiny_model().config.vocab_size).calibration.rows()
    assert bool(rates) == (name == "switch")
    first = method.stats.num_steps
    method.forget()
    method.answer(tiny_model(), ids(), **asked)
    assert method.stats.num_steps == first


def taught(source: DiaaSource, *rows: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """What a source holds behind token 3 after some top-Ks of the model."""
    for row in rows:
        token_ids, chances = zip(*row, strict=True)
        top = TopK(np.array([token_ids], np.int32), np.array([chances], np.float16))
        source.observe_pairs(np.array([[-1, 3]]), top)
    pairs = source.next_tokens((-1, 3))
    return [(token, RecordedProbabilities().probability((kind,))) for token, kind in pairs]


def test_a_row_of_diaa_is_what_the_model_said_last_with_its_probabilities():
    rows = ((5, 0.5), (-1, 0)), ((6, 0.75), (7, 0.125))
    assert taught(DiaaSource(10, 2), *rows) == [(6, 0.75), (7, 0.125)]


def test_a_row_of_diaa_read_otherwise_replaces_its_least_likely_entry():
    source = MergingSource(10, 2)
    assert taught(source, ((5, 0.5), (-1, 0))) == [(5, 0.5)]
    assert taught(source, ((6, 0.75), (7, 0.25))) == [(6, 0.75), (5, 0.5)]  # Now it is full.
    assert taught(source, ((7, 0.25), (5, 0.125))) == [(6, 0.75), (7, 0.25)]  # 5 was less likely.
    assert taught(source, ((7, 0.875), (5, 0.0625))) == [(7, 0.875), (6, 0.75)]


def test_diaa_drafts_what_its_own_threshold_and_decays_let_through():
    config = new_method("diaa", Resources(config=SpecConfig(threshold=0.5))).spec.config
    assert (config.threshold, config.depth_decay, config.width_decay) == (5e-3, 0.8, 0.7)


def test_branches_as_self_draft_starts_them_draft_nothing_until_they_are_filled():
    method = new_method("self-draft", Resources())
    records: list = []
    with method.spec.listening(records.append):
        for seed in range(3):
            method.answer(tiny_model(), ids(seed), **ASKED)
    assert [len(branch) for branch in RandomStarts([5, 6, 7], 2, 6).tokens] == [3, 3]
    drafted = next(n for n, record in enumerate(records) if any(record.tree.scores[1:]))
    assert sum(len(record.committed_ids) for record in records[:drafted]) >= 6
    assert all(len(gram) == 4 for record in records for gram in record.grams)
    assert any(record.accepted_nodes() for record in records)


def test_the_switch_copies_a_long_match_and_else_asks_the_lut():
    span = [1, 2, 3, 4, 5, 6, 7]
    source = SwitchSource(20, 2)
    top = TopK(np.array([[9, 8]]), np.array([[0.5, 0.3]], np.float16))
    source.observe_pairs(np.array([[-1, 5]]), top)
    long = source.open([*span, 0, *span[:5]], learns=True)
    assert [(token, kind.source) for token, kind in long.expand(long.root())] == [(6, "match")]
    short = source.open([*span, 0, 5], learns=True)
    assert [(token, kind.rank) for token, kind in short.expand(short.root())] == [(9, 1), (8, 2)]


def test_a_published_method_starts_with_the_cache():
    """Known beforehand: what `new_spec` gives has a LUT already."""
    model, spec = attach(tiny_model()), SelfSpec(sources=("lut",))
    model.generate(ids(), assistant=spec, max_new_tokens=24, do_sample=False)
    contents = spec.contents(tokenizer=make_tokenizer())
    warm = Resources(new_spec=lambda config: SelfSpec.from_contents(contents, config=config))
    cold, prebuilt = (new_method("lut-tree", given) for given in (Resources(), warm))
    for method in (cold, prebuilt):
        method.answer(model, ids(), **ASKED)
    assert prebuilt.stats.num_steps < cold.stats.num_steps


def verdict(stock: list[int], other: list[int], *, greedy: bool = True) -> Verdict:
    return compare(new_model(), [5, 6], stock, other, greedy=greedy)


def test_verdicts():
    likeliest = int(new_model()(torch.tensor([[5, 6]])).logits[0, -1].argmax())
    other = (likeliest + 1) % 40
    assert verdict([likeliest, 3], [likeliest, 3]) == Verdict("identical")
    found = verdict([likeliest, 3], [other, 3])
    assert (found.same, found.differs_at) == ("different", 0)
    assert found.gap_ulps > MAX_ULPS
    assert verdict([3], [4], greedy=False) == Verdict("different", 0)
    twins = new_model()
    head = twins.lm_head.weight.data
    head[other] = head[likeliest]
    tie = compare(twins, [5, 6], [likeliest], [other], greedy=True)
    assert tie == Verdict("near-tie", 0, 0.0)
    assert verdict([3], [3, 4]) == Verdict("different", 1)

"""The published methods, how questions are put, and when a text counts as stock's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from eval.benches.dialogue import Prompter, padded
from eval.benches.questions import Question
from eval.errors import EvalError
from eval.methods.diaa import DiaaSource, MergingSource, RecordedProbabilities
from eval.methods.fixed_tree import NUM_DRAFTED, fixed_shape
from eval.methods.method import Resources
from eval.methods.published import FIXED_NODES, PUBLISHED
from eval.methods.registry import new_method
from eval.methods.sameness import MAX_ULPS, Verdict, compare
from eval.methods.self_draft import RandomStarts
from selfspec import SelfSpec, SpecConfig, attach
from selfspec.records import TopK
from tests.conftest import TEMPLATE
from tests.fakes import new_model, prompt, tiny_model
from tests.tiny import make_tokenizer

ASKED = {"max_new_tokens": 24, "temperature": 0.0, "seed": 0}


def ids() -> torch.Tensor:
    return prompt()["input_ids"]


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
@pytest.mark.parametrize("name", SOURCES)
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
    for parent, rank in fixed_shape().slots:
        shape.append((*shape[parent], rank + 1))
    assert len(set(shape)) - 1 == NUM_DRAFTED == 80
    assert max(map(len, trees)) > 40
    assert all(tree <= set(shape) for tree in trees)  # less where the LUT has no row yet


BEHIND_3 = np.array([[-1, 3]])


def top(*entries: tuple[int, float]) -> TopK:
    ids, chances = zip(*entries, strict=True)
    return TopK(np.array([ids], np.int32), np.array([chances], np.float16))


def row_of(source: DiaaSource) -> list[tuple[int, float]]:
    pairs = source.next_tokens((-1, 3))
    return [(token, RecordedProbabilities().probability((kind,))) for token, kind in pairs]


def test_a_row_of_diaa_is_what_the_model_said_last_with_its_probabilities():
    source = DiaaSource(10, 2)
    source.observe_pairs(BEHIND_3, top((5, 0.5), (-1, 0)))
    source.observe_pairs(BEHIND_3, top((6, 0.75), (7, 0.125)))
    assert row_of(source) == [(6, 0.75), (7, 0.125)]


def test_a_row_of_diaa_read_otherwise_replaces_its_least_likely_entry():
    source = MergingSource(10, 2)
    row = partial(row_of, source)
    source.observe_pairs(BEHIND_3, top((5, 0.5), (-1, 0)))
    assert row() == [(5, 0.5)]
    source.observe_pairs(BEHIND_3, top((6, 0.75), (7, 0.25)))  # The row is full behind 6.
    assert row() == [(6, 0.75), (5, 0.5)]
    # 7 takes the place of 5, which was less likely.
    source.observe_pairs(BEHIND_3, top((7, 0.25), (5, 0.125)))
    assert row() == [(6, 0.75), (7, 0.25)]
    source.observe_pairs(BEHIND_3, top((7, 0.875), (5, 0.0625)))
    assert row() == [(7, 0.875), (6, 0.75)]


def test_diaa_drafts_what_its_own_threshold_and_decays_let_through():
    config = new_method("diaa", Resources(config=SpecConfig(threshold=0.5))).spec.config
    assert (config.threshold, config.depth_decay, config.width_decay) == (5e-3, 0.8, 0.7)


def test_branches_as_self_draft_starts_them_draft_nothing_until_they_are_filled():
    method = new_method("self-draft", Resources())
    records: list = []
    with method.spec.listening(records.append):
        for seed in range(3):
            method.answer(tiny_model(), prompt(seed=seed)["input_ids"], **ASKED)
    first = RandomStarts([5, 6, 7], 2, 6)
    assert [len(branch) for branch in first.tokens] == [3, 3]
    num_committed = 0
    drafted = next(n for n, record in enumerate(records) if any(record.tree.scores[1:]))
    for record in records[:drafted]:
        num_committed += len(record.committed_ids)
    assert num_committed >= 6
    assert all(len(gram) == 4 for record in records for gram in record.grams)
    assert any(record.accepted_nodes() for record in records)


def test_a_published_method_starts_with_the_cache():
    """Known beforehand: what `new_spec` gives has a LUT already."""
    model = tiny_model()
    taught = SelfSpec(sources=("lut",))
    ids_ = ids()
    attach(model).generate(ids_, assistant=taught, max_new_tokens=24, do_sample=False)
    contents = taught.contents(tokenizer=make_tokenizer())
    warm = Resources(new_spec=lambda config: SelfSpec.from_contents(contents, config=config))
    steps = {}
    for state, given in (("cold", Resources()), ("prebuilt", warm)):
        method = new_method("lut-tree", given)
        method.answer(model, ids_, **ASKED)
        steps[state] = method.stats.num_steps
    assert steps["prebuilt"] < steps["cold"]


QUESTION = Question(1, "qa", ("first", "second"), "go on:")


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = make_tokenizer()
    plain = Prompter(tokenizer)
    assert plain.format == "plain"
    assert tokenizer.decode(plain.prompt_ids(QUESTION, [])) == "go on:"
    assert tokenizer.decode(plain.prompt_ids(QUESTION, ["yes"])) == "go on:yes\n\nsecond\n"
    tokenizer.chat_template = TEMPLATE
    chat = Prompter(tokenizer)
    assert chat.format == "chat"
    text = tokenizer.decode(chat.prompt_ids(QUESTION, ["yes"]))
    assert text == "<|user|>first<|assistant|>yes<|eos|><|user|>second<|assistant|>"
    assert Prompter(tokenizer, "plain").format == "plain"
    with pytest.raises(EvalError, match=r"unknown prompt format 'x'"):
        Prompter(tokenizer, "x")
    assert chat.text(tokenizer("yes<|eos|>")["input_ids"]) == "yes"


def test_prompts_side_by_side_end_together():
    ids_, mask = padded([[5], [6, 7, 8]], 0)
    assert ids_.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


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

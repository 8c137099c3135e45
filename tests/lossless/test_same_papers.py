"""The papers' own methods, and a user's own source, budget, shape and scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from eval.papers import PAPERS, as_in
from eval.papers.ghidorah import FittedTree
from eval.papers.self_draft import Branches, CorpusCache
from selfspec import SelfSpec
from selfspec.config import SOURCE_NAMES
from selfspec.draft.calibration import Calibration
from selfspec.errors import ConfigError
from tests.fakes import VOCAB, new_model, prompt, tiny_model
from tests.lossless.same import (
    FEW,
    FIXED,
    GREEDY,
    SAMPLE,
    Call,
    recorded_forwards,
    run,
    run_both,
    slow,
)
from tests.zoo import BRANCHING, NOT_BRANCHING

DRAFTS = {
    "diaa": {"lut"},
    "self-draft": {"grams", "corpus"},
    "edgellm": {"draft model"},
    "ghidorah": set(SOURCE_NAMES),
}


TRIED = (*FEW, "bloom", "mamba")


def made(paper: str, **options: Any) -> SelfSpec:
    """With the small model or the tree that it needs."""
    if paper == "edgellm":
        options["draft_model"] = new_model(num_hidden_layers=1)
    if paper == "ghidorah":
        options["tree"] = FittedTree((0, 0, 1), (0, 2, 1), (0.6, 0.2, 0.1))
    if paper == "self-draft":
        options.setdefault("corpus", CorpusCache([[*range(5, 40)] * 2], min_count=1))
    return as_in(paper, **options)


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_s_method_gives_stock_s_text(paper: str, call: Call) -> None:
    model, spec = tiny_model("mistral"), made(paper)
    for _ in range(2):
        both = run_both(model, call.inputs, spec, drafts=False, **call.options)
        assert both.stats.disabled_reason is None
    assert both.stats.num_nodes > both.stats.num_steps
    assert set(both.stats.drafted_by_source) <= DRAFTS[paper]


def one_paper_each() -> list[Any]:
    """Every paper on every architecture, of which some get one by default, in turns."""
    names = [*BRANCHING, *NOT_BRANCHING]
    return [
        (name, paper) if name in TRIED and number % len(PAPERS) == index else slow(name, paper)
        for number, name in enumerate(names)
        for index, paper in enumerate(PAPERS)
    ]


@pytest.mark.parametrize(("name", "paper"), one_paper_each())
@pytest.mark.filterwarnings("ignore:.*falling back to.*:UserWarning")
def test_on_other_architectures(name: str, paper: str) -> None:
    spec = made(paper, max_nodes=12)
    run_both(tiny_model(name), prompt(2), spec, drafts=False, **SAMPLE)


@pytest.mark.parametrize("learning", ["request", "frozen"])
@pytest.mark.parametrize("paper", PAPERS)
def test_every_learning_scope(paper: str, learning: str) -> None:
    spec = made(paper, learning=learning)
    steps = [
        run_both(tiny_model(), prompt(), spec, drafts=False, **GREEDY).stats.num_steps
        for _ in range(2)
    ]
    if paper != "edgellm":  # Its threshold goes on from call to call.
        assert steps[0] == steps[1]


def test_to_forget_is_to_forget_what_a_calibration_counted() -> None:
    """One of a user's own may serve several, which learn apart."""
    own = type("Own", (Calibration,), {})()
    spec, other = (SelfSpec(calibration=own) for _ in range(2))
    run_both(tiny_model(), prompt(), spec, drafts=False, **GREEDY)
    assert type(spec.learned(VOCAB).calibration) is type(own)
    assert spec.learned(VOCAB).calibration.rows()
    spec.forget()
    assert not spec.learned(VOCAB).calibration.rows()
    assert not other.learned(VOCAB).calibration.rows()


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"as_in\('edgellm'\) needs a small model"):
        as_in("edgellm")
    with pytest.raises(ConfigError, match=r"as_in\('ghidorah'\) needs a fitted tree"):
        as_in("ghidorah")
    with pytest.raises(ConfigError, match="tree must be a file that 'python -m eval fit' made"):
        as_in("ghidorah", tree="nowhere.json")
    with pytest.raises(ConfigError, match="a fitted tree must have parents before children"):
        FittedTree((1,), (0,), (0.5,))
    with pytest.raises(ConfigError, match="draft_model must be a causal language model"):
        as_in("edgellm", draft_model="int8")
    with pytest.raises(ConfigError, match=r"max_nodes must be a whole number \(got 'x'\)"):
        as_in("edgellm", draft_model=tiny_model(), max_nodes="x")
    with pytest.raises(ConfigError, match="shape must be a Shape"):
        SelfSpec(shape="wide")


def test_what_branches_cost_is_what_the_stats_say() -> None:
    model, spec = tiny_model(), SelfSpec(shape=Branches(4, 5), **FIXED)
    with recorded_forwards(model) as widths:
        run(model, prompt(), custom_generate=spec, **GREEDY)
    stats = spec.stats
    # the prompt's forward and, on first use, the probe's come first
    in_steps = widths[-stats.num_steps :]
    assert sum(in_steps) == stats.num_nodes

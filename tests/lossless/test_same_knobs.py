"""No knob and no budget changes the text; the learning scope says what stays behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from eval.papers.diaa import DynamicTree
from eval.papers.ghidorah import FittedTree
from eval.papers.self_draft import Branches
from selfspec import SelfSpec
from selfspec.cost import CostCurve
from selfspec.forward.costs import Costs
from tests.fakes import VOCAB, lut_of, prompt, tiny_model
from tests.lossless.same import (
    FIXED,
    GREEDY,
    SAMPLE,
    Call,
    doubting,
    run,
    run_both,
    slow,
)

OTHERS = ("llama", "gemma3", "gpt2", "gpt-oss", "deepseek-v3")
KNOBS: dict[str, dict[str, Any]] = {
    "max_nodes=1": {"max_nodes": 1},
    "max_nodes=2": {"max_nodes": 2},
    "max_nodes=7": {"max_nodes": 7},
    "max_nodes=16": {"max_nodes": 16},
    "max_nodes=64": {"max_nodes": 64},
    "max_depth=1": {"max_depth": 1},
    "top_k=1": {"top_k": 1},
    "top_k=vocabulary": {"top_k": 2 * VOCAB},
    "intervals": {"shape": DynamicTree(delta=1.0, alpha=1.0, tau=0.0, interval=3)},
    "decays": {"shape": DynamicTree()},
    "request": {"learning": "request"},
    "session": {"learning": "session"},
    "frozen": {"learning": "frozen"},
    "branches": {"shape": Branches()},
    "long branches": {"shape": Branches(2, 10), "max_nodes": 5},
    "all": {"max_nodes": 9, "max_depth": 4, "top_k": 2, "shape": DynamicTree(interval=2)},
}


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
@pytest.mark.parametrize("name", ["mistral", *map(slow, OTHERS)])
def test_knobs(name: str, knobs: dict[str, Any], call: Call) -> None:
    max_nodes = knobs.get("max_nodes", FIXED["max_nodes"])
    model, spec = tiny_model(name), partial(doubting, **knobs)
    both = run_both(model, call.inputs, spec, drafts=max_nodes > 1, **call.options)
    assert both.stats.nodes_per_step <= max_nodes


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("learning", ["request", "frozen", "session"])
def test_nothing_stays_behind_but_in_a_session(learning: str, num_rows: int) -> None:
    spec = SelfSpec(learning="session")
    run_both(tiny_model(), prompt(2, seed=5), spec, **GREEDY)
    spec.config = spec.config.changed(learning=learning)
    spec._runners.clear()
    before = _knowledge(spec)
    run_both(tiny_model(), prompt(num_rows), spec, **SAMPLE)
    assert (before == _knowledge(spec)) == (learning != "session")


def _knowledge(spec: SelfSpec) -> tuple[bytes, bytes, dict[Any, Any]]:
    """All that a call could have changed, as values."""
    memory = spec.learned(VOCAB)
    lut = lut_of(spec, VOCAB)
    tables = (lut.token_ids, lut.probabilities)
    return (*(np.array(table).tobytes() for table in tables), dict(memory.calibration._rates))


FLAT = {1: 1.0, 64: 1.01}
STEEP = {1: 1.0, 64: 64.0}
STAIRS = {1: 1.0, 4: 1.0, 5: 2.0, 8: 2.0, 9: 4.0, 64: 9.0}


@pytest.mark.parametrize("points", [FLAT, STEEP, STAIRS], ids=["flat", "steep", "stairs"])
def test_whatever_a_forward_costs(
    points: dict[int, float], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = CostCurve(points)
    monkeypatch.setattr(Costs, "curve", lambda *_: curve)
    spec = partial(doubting, max_nodes=24, budget="measured")
    run_both(tiny_model("mistral"), call.inputs, spec, drafts=False, **call.options)


def test_one_fitted_shape(call: Call) -> None:
    """Every step fills the same places, at most; what is not named is left out."""
    model, inputs = tiny_model("mistral"), call.inputs
    tree = FittedTree((0, 0, 1), (0, 2, 1), (0.6, 0.2, 0.1))
    stock = run(model, inputs, **call.options)
    spec = doubting(stock.ids, inputs, shape=tree)
    trees: list[list[int]] = []
    with spec.listening(lambda record: trees.append(record.tree.parents)):
        both = run_both(model, inputs, spec, **call.options)
    assert max(map(len, trees)) <= 4
    assert both.stats.num_steps < both.stats.num_new_tokens
    trees.clear()
    chains = doubting(stock.ids, inputs, shape=tree, top_k=1)
    with chains.listening(lambda record: trees.append(record.tree.parents)):
        run_both(model, inputs, chains, **call.options)
    assert all(parents == [*range(-1, len(parents) - 1)] for parents in trees)

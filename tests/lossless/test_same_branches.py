"""Branches riding in the forwards change no token, draw nothing, and stay out of the KV."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from selfspec import SelfSpec
from selfspec.compat.generation import kv_of
from selfspec.papers.self_draft import Branches
from tests.fakes import new_model, prompt, tiny_model
from tests.lossless.same import (
    FIXED,
    GREEDY,
    MODES,
    SAMPLE,
    assert_same_kv,
    doubting,
    few,
    recorded_forwards,
    run,
    run_both,
)
from tests.zoo import BRANCHING, NOT_BRANCHING

BRANCHES: dict[str, Any] = {"shape": Branches(4, 5), **FIXED}


@pytest.mark.parametrize("name", few(BRANCHING))
def test_architectures(name: str) -> None:
    both = run_both(tiny_model(name), prompt(3), partial(doubting, **BRANCHES), **SAMPLE)
    assert both.stats.nodes_per_step > 6


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BRANCHING)
def test_architectures_and_prompts(name: str, seed: int, attention: str) -> None:
    if attention not in BRANCHING[name].attentions:
        pytest.skip(f"{name} has no {attention}")
    model, inputs = tiny_model(name, attention), prompt(1 + seed, 5 + 7 * seed, seed=seed)
    for options in MODES.values():
        spec = SelfSpec(shape=Branches(1 + 2 * seed, 2 + 2 * seed))
        run_both(model, inputs, spec, seed=seed, **options)


@pytest.mark.parametrize("name", few(NOT_BRANCHING, ("bloom", "mamba", "gpt-neo")))
@pytest.mark.filterwarnings("ignore:.*falling back to.*:UserWarning")
def test_where_no_tree_fits_branches_are_chains(name: str) -> None:
    spec = SelfSpec(**BRANCHES)
    run_both(tiny_model(name), prompt(3), spec, drafts=False, **GREEDY)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_that_move_together(num_rows: int) -> None:
    """Recorded scores make them; a row that stopped asks nothing more."""
    asked = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": [15, 81]}
    options: dict[str, Any] = {"drafts": False, **asked, **SAMPLE}
    both = run_both(tiny_model(), prompt(num_rows), SelfSpec(**BRANCHES), **options)
    assert len(both.ours.output.scores) == len(both.stock.output.scores)


def test_the_kv_that_is_handed_back_knows_nothing_of_them() -> None:
    for name in ("llama", "gemma3"):
        options = {"return_dict_in_generate": True, **GREEDY}
        both = run_both(tiny_model(name), prompt(), SelfSpec(**BRANCHES), **options)
        assert_same_kv(kv_of(both.ours.output), kv_of(both.stock.output))


def test_no_position_is_asked_that_the_model_lacks() -> None:
    """Near the end of learned positions, trees and branches get shorter."""
    inputs = prompt()
    model = new_model("gpt2", n_positions=inputs["input_ids"].shape[1] + 40)
    spec = SelfSpec(shape=Branches(3, 9))
    for seed in range(4):
        run_both(model, inputs, spec, seed=seed, **SAMPLE)
    run_both(model, inputs, SelfSpec(), **GREEDY)


def test_what_they_cost_is_what_the_stats_say() -> None:
    model, spec = tiny_model(), SelfSpec(**BRANCHES)
    with recorded_forwards(model) as widths:
        run(model, prompt(), custom_generate=spec, **GREEDY)
    stats = spec.stats
    # the prompt's forward and, on first use, the probe's come first
    in_steps = widths[-stats.num_steps :]
    assert sum(in_steps) == stats.num_nodes

"""Models with a running state: whatever is predicted, the text and the states are stock's."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from selfspec import SelfSpec
from selfspec.compat.generation import KV, kv_of
from tests.batch.test_generate_many import assert_as_alone, prompts
from tests.fakes import new_model, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    MODES,
    NUM_COLUMNS,
    Call,
    assert_same_kv,
    doubting,
    few,
    run,
    run_both,
    slow,
)
from tests.lossless.test_same_predictions import ALONE, KINDS, edited, predicting
from tests.zoo import BOUNDED, HYBRID, RECURRENT

NAMES = (*HYBRID, *RECURRENT, *BOUNDED)
# Zaya moves its states on by code of its own. Before transformers 5.24, those of recurrent models
# are out of reach.
DRAFTED = tuple(
    name for name in NAMES if name != "zaya" and (KV == "cache" or name not in RECURRENT)
)
# Attention that branches in no model of its kind.
CHAINS = ("inkling", "qwen4")
# A state beside attention, in one layer with it, alone, and convolutions alone.
FEW = ("qwen3-5", "falcon-h1", "mamba2", "lfm2")
# Their layers with states are those of another family.


WINDOWED = [name for name in ("inkling", "lara-mini", "lfm3") if name in HYBRID]
RETURNED = {"return_dict_in_generate": True}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", few([name for name in DRAFTED if name not in CHAINS], FEW))
def test_states_branch_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Also where all ways of stock happen to give the same bits."""
    support = SelfSpec().support(new_model(name, dtype=dtype))
    assert support.mode == "tree", support.reason


@pytest.mark.parametrize("name", NAMES)
def test_predictions(name: str, call: Call) -> None:
    model, inputs = tiny_model(name), call.inputs
    for kind, least in {"right": 4.5, "edited": 1.5, "wrong": 0.9}.items():
        more = {"told": predicting(KINDS[kind]), "drafts": False, **call.options}
        both = run_both(model, inputs, SelfSpec(**ALONE), **more)
        stats = both.stats
        if name in DRAFTED:
            assert stats.tokens_per_step > least
            assert stats.num_nodes > stats.num_steps
            assert stats.mode == ("chain" if name in CHAINS else "tree")


@pytest.mark.parametrize("name", few(NAMES, FEW))
def test_drafts_that_are_right_for_a_while(name: str, call: Call) -> None:
    """In nearly each step some are accepted, and some are not."""
    spec = partial(doubting, max_nodes=8)
    run_both(tiny_model(name), call.inputs, spec, drafts=False, **call.options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_many_prompts(name: str, mode: str, seed: int) -> None:
    """The shortest prompt is as long as some convolutions."""
    inputs, spec = prompt(seed, 3 + 7 * (seed - 1), seed=seed), partial(doubting, seed=seed)
    run_both(tiny_model(name), inputs, spec, seed=seed, drafts=False, **MODES[mode])


@pytest.mark.parametrize("name", [*WINDOWED, *(name for name in DRAFTED if name == "qwen4")])
def test_texts_that_outgrow_windows(name: str, call: Call) -> None:
    """In transformers 5.17, Qwen4 keeps the positions of all columns in the cache itself."""
    more = {"told": predicting(edited), "drafts": False, "max_new_tokens": 60, **call.options}
    both = run_both(tiny_model(name), call.inputs, SelfSpec(**ALONE), **RETURNED, **more)
    assert_same_kv(kv_of(both.ours.output), kv_of(both.stock.output))


@pytest.mark.parametrize("length", [slow(1), 2, slow(5), 14])
@pytest.mark.parametrize("name", [*FEW, "qwen4"])
def test_no_state_holds_more_than_the_text(name: str, length: int) -> None:
    """An accepted chain that runs past the limit leaves nothing behind."""
    model, inputs = tiny_model(name), prompt()
    answer = run(model, inputs, **GREEDY).ids[0, NUM_COLUMNS:].tolist()
    options = {"max_new_tokens": length, "drafts": False, **RETURNED, **GREEDY}
    spec, told = SelfSpec(**ALONE), lambda _: {"prediction": answer}
    both = run_both(model, inputs, spec, told=told, **options)
    if hasattr(both.stock.output, KV):
        assert_same_kv(kv_of(both.ours.output), kv_of(both.stock.output))


@pytest.mark.parametrize("name", ["qwen3-5", slow("falcon-h1"), slow("mamba2"), slow("lfm2")])
@pytest.mark.parametrize("mode", MODES)
def test_many_prompts_over_one_model(name: str, mode: str) -> None:
    spec = SelfSpec(budget="fixed", max_nodes=6)
    assert_as_alone(tiny_model(name), prompts((9, 17, 12)), spec, max_new_tokens=12, **MODES[mode])


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("spread", [0.05, 0.2])
def test_trees_bound_no_time_steps(name: str, spread: float) -> None:
    """Stock's forwards over several tokens do, while its plain steps do not."""
    model = new_model(name, initializer_range=spread)
    more = {"told": predicting(edited), "drafts": False, "max_new_tokens": 60, **GREEDY}
    stats = run_both(model, prompt(), SelfSpec(**ALONE), **more).stats
    assert stats.mode == "tree"
    assert stats.num_nodes > stats.num_steps

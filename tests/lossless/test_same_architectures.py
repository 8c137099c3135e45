"""Every architecture, attention, batch and decoding mode gives stock's text."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from tests.fakes import prompt, tiny_model
from tests.lossless.same import (
    FEW,
    MODES,
    NUM_COLUMNS,
    SAMPLE,
    doubting,
    late_token,
    run,
    run_both,
    slow,
)
from tests.zoo import BRANCHING, NOT_BRANCHING, Architecture

# Half of what a plain forward of these costs is Python; chains of theirs are refused too.
FALL_BACK_NOTE = "ignore:.*falling back to.*:UserWarning"


def cases(architectures: dict[str, Architecture]) -> list[Any]:
    """The full cross product.

    By default one greedy and one sampling case of the architectures that differ most, and one of
    the two of all others, in turns.
    """
    params = []
    for number, (name, kind) in enumerate(architectures.items()):
        default = [(kind.attentions[0], 3, "sample"), (kind.attentions[-1], 1, "greedy")]
        default = default if name in FEW else default[number % 2 :][:1]
        for case in itertools.product(kind.attentions, (1, 3), MODES):
            marks = () if case in default else (pytest.mark.slow,)
            id_ = "-".join(map(str, (name, *case)))
            params.append(pytest.param(name, *case, marks=marks, id=id_))
    return params


def ending(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, with an end token that stops the last row as late as one can."""
    ids = run(model, inputs, **options).ids
    return {**options, "eos_token_id": late_token(ids[-1, NUM_COLUMNS:-1].tolist())}


@pytest.mark.parametrize(("name", "attention", "num_rows", "mode"), cases(BRANCHING))
def test_branching(name: str, attention: str, num_rows: int, mode: str) -> None:
    model = tiny_model(name, attention)
    inputs = prompt(num_rows)
    both = run_both(model, inputs, **ending(model, inputs, MODES[mode]))
    assert both.stats.tokens_per_step > 1.2


@pytest.mark.parametrize(("name", "attention", "num_rows", "mode"), cases(NOT_BRANCHING))
@pytest.mark.filterwarnings(FALL_BACK_NOTE)
def test_not_branching(name: str, attention: str, num_rows: int, mode: str) -> None:
    model = tiny_model(name, attention)
    inputs = prompt(num_rows)
    both = run_both(model, inputs, drafts=False, **ending(model, inputs, MODES[mode]))
    assert both.stats.disabled_reason
    assert both.stats.num_new_tokens >= both.stats.num_steps


@pytest.mark.parametrize("name", [slow("llama"), slow("llama4"), slow("mistral"), "gemma3"])
@pytest.mark.parametrize("num_rows", [slow(1), 3])
def test_outputs_that_outgrow_the_first_arenas(name: str, num_rows: int) -> None:
    """Slots for 256 tokens are made at once; beyond, arenas grow and windowed ones forget."""
    run_both(tiny_model(name), prompt(num_rows), max_new_tokens=260, **SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHING)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("mode", MODES)
def test_many_prompts(name: str, seed: int, mode: str) -> None:
    inputs, spec = prompt(4, 5 + 7 * seed, seed=seed), partial(doubting, seed=seed, max_nodes=24)
    run_both(tiny_model(name), inputs, spec, seed=seed, **MODES[mode])

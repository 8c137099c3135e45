"""What was said before drafts for what is said again, within the reach of `learning`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec import SelfSpec, generate_many
from tests.fakes import prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import FIXED, MODES, NUM_NEW, Call, run_both

ALONE: dict[str, Any] = {"sources": ("texts",), **FIXED}


@pytest.mark.parametrize(("learning", "is_known"), [("session", True), ("request", False)])
def test_the_same_prompt_again(learning: str, is_known: bool, call: Call) -> None:
    """Random tokens never repeat themselves within a text."""
    spec = SelfSpec(learning=learning, **ALONE)
    first = run_both(tiny_model(), call.inputs, spec, drafts=False, **call.options)
    again = run_both(tiny_model(), call.inputs, spec, drafts=False, **call.options)
    assert again.stats.num_steps < first.stats.num_steps / 2 or not is_known
    assert again.stats.num_steps == first.stats.num_steps or is_known
    spec.forget()
    anew = run_both(tiny_model(), call.inputs, spec, drafts=False, **call.options)
    assert anew.stats.num_steps == first.stats.num_steps


def test_frozen_knows_what_was_loaded_and_learns_nothing(call: Call) -> None:
    spec = SelfSpec(**ALONE)
    run_both(tiny_model(), call.inputs, spec, drafts=False, **call.options)
    held = spec.contents(tokenizer=tiny_tokenizer())
    frozen = SelfSpec(contents=held, learning="frozen", **ALONE)
    both = run_both(tiny_model(), call.inputs, frozen, drafts=True, **call.options)
    assert both.stats.tokens_per_step > 2
    other = prompt(call.num_rows, seed=9)
    steps = [
        run_both(tiny_model(), other, frozen, drafts=False, **call.options).stats.num_steps
        for _ in range(2)
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("mode", MODES)
def test_prompts_that_come_and_go_draft_for_each_other(mode: str) -> None:
    """One row after the other writes the same text, but for sampling."""
    model, ids = tiny_model(), prompt()["input_ids"][0].tolist()
    spec = SelfSpec(**ALONE)
    options = {"max_new_tokens": NUM_NEW, **MODES[mode]}
    rounds = []
    for _ in range(2):
        answers = list(
            generate_many(
                model, tiny_tokenizer(), [ids] * 3, assistant=spec, max_rows=1, seed=3, **options
            )
        )
        rounds.append([answer.ids for answer in sorted(answers, key=lambda each: each.index)])
        for answer in answers if len(rounds) == 2 else []:
            assert answer.stats.tokens_per_step > 2
    assert rounds[0] == rounds[1]
    torch.manual_seed(3)
    stock = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
    assert rounds[0][0] == stock[0, len(ids) :].tolist()

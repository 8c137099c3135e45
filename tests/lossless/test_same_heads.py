"""Heads that come with a model change no text, however wrong they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from selfspec import SelfSpec
from tests.batch.test_generate_many import assert_as_alone, prompts
from tests.fakes import prompt, tiny_model
from tests.heads import (  # noqa: F401
    FAMILIES,
    heads_of,
    model_with_heads,
    needs_heads,
    random_heads,
)
from tests.lossless.same import FIXED, GREEDY, MODES, Call, run, run_both
from tests.recorder import use_recorders

pytestmark = [pytest.mark.usefixtures("random_heads"), needs_heads]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_stocks(family: str, call: Call) -> None:
    """Prompts of several rows have padding on the left, and windows are shorter than texts."""
    spec = SelfSpec(sources=("heads", "context"), forward="eager", **FIXED)
    both = run_both(model_with_heads(family), call.inputs, spec, drafts=False, **call.options)
    assert both.stats.heads_reason is None
    assert both.stats.drafted_by_source["heads"] > call.num_rows
    assert both.stats.num_draft_forwards > call.num_rows


def test_many_prompts_that_come_and_go() -> None:
    spec = SelfSpec(forward="eager", **FIXED)
    assert_as_alone(model_with_heads(), prompts(), spec, do_sample=True, max_new_tokens=6)
    assert spec.total_stats.drafted_by_source["heads"]


@pytest.mark.parametrize("learning", ["request", "frozen"])
def test_they_need_no_learning_and_may_be_paused(learning: str) -> None:
    spec = SelfSpec(sources=("heads",), learning=learning, forward="eager")
    for options in MODES.values():
        both = run_both(model_with_heads(), prompt(2), spec, drafts=False, **options)
        assert both.stats.heads_reason is None


def test_captured_forwards_say_why_heads_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recorders(monkeypatch)
    model, spec = model_with_heads(), SelfSpec(forward="graph", **FIXED)
    both = run_both(model, prompt(), spec, **GREEDY)
    assert both.stats.forward == "graph"
    assert "show nobody the hidden states" in str(both.stats.heads_reason)


def test_models_without_heads_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.neural.heads.load_heads", None)
    both = run_both(tiny_model(), prompt(), SelfSpec(**FIXED), **GREEDY)
    assert both.stats.heads_reason is None
    assert both.stats.num_draft_forwards == 0


def test_heads_of_a_checkpoint_draft_what_stock_drafts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stock accepts of its heads is accepted here."""
    monkeypatch.undo()
    made = model_with_heads(number=1)
    made.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    held = {
        f"model.layers.2.{name.removeprefix('layers.0.').removeprefix('mtp_block.')}": weight
        for name, weight in heads_of(made).state_dict().items()
        if name.startswith("layers.")
    }
    held = {name.replace("post_norm", "shared_head.norm"): each for name, each in held.items()}
    save_file(load_file(file) | held, file, metadata={"format": "pt"})
    monkeypatch.setattr(type(made), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    spec, drawn = SelfSpec(sources=("heads",), forward="eager", **FIXED), torch.get_rng_state()
    both = run_both(model, prompt(), spec, **GREEDY)
    assert torch.equal(torch.get_rng_state(), drawn)  # Loading heads draws nothing of the user's.
    mtp = run(model, prompt(), use_mtp=True, **GREEDY)
    assert both.stats.heads_reason is None
    assert torch.equal(both.ours.ids, mtp.ids)
    assert spec.stats.drafted_by_source["heads"]

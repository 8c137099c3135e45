"""The contestants: each answers through stock's generate(), and is found by its name."""

from __future__ import annotations

import pytest
import torch

from eval.methods.method import Resources, SelfSpecMethod
from eval.methods.registry import new_method
from eval.methods.timing import num_new_tokens, timed
from selfspec import SelfSpec, SpecConfig
from tests.fakes import new_model, prompt, tiny_model
from tests.recorder import use_recorders

ASKED = {"max_new_tokens": 12, "temperature": 0.0, "seed": 0}


def ids() -> torch.Tensor:
    return prompt()["input_ids"]


@pytest.mark.parametrize(
    "name", ["stock", "stock-padded", "prompt-lookup", "forward-only", "selfspec", "assisted"]
)
def test_a_method_answers_as_stock_does(name):
    model = tiny_model()
    method = new_method(name, Resources(assistant=new_model(num_hidden_layers=1)))
    assert method.name == name
    assert method.refusal(model) is None
    expected = new_method("stock").answer(model, ids(), **ASKED)
    assert torch.equal(method.answer(model, ids(), **ASKED), expected)
    assert num_new_tokens(expected, ids()) == 12


def test_forward_only_drafts_nothing_and_learns_nothing():
    config = SpecConfig(max_nodes=8)
    method = new_method("forward-only", Resources(config=config))
    for _ in range(2):
        method.answer(tiny_model(), ids(), **ASKED)
        assert method.stats.tokens_per_step == 1
        assert method.stats.queries_per_step == 1
        assert method.stats.disabled_reason is None


def test_forgetting_drops_what_was_learned():
    method = SelfSpecMethod("ours", SelfSpec(budget="fixed"))  # a measured one goes by the clock
    steps = []
    for forgets in (False, False, True):
        if forgets:
            method.forget()
        method.answer(tiny_model(), ids(), **ASKED)
        steps.append(method.stats.num_steps)
    assert steps[1] < steps[0] == steps[2]


@pytest.mark.parametrize("name", ["stock", "prompt-lookup", "selfspec"])
def test_the_prompts_forward_and_the_rest_are_told_apart(name: str):
    model, method = new_model(), new_method(name)
    result = timed(model, lambda: method.answer(model, ids(), **ASKED))
    assert torch.equal(result.output, method.answer(model, ids(), **ASKED))
    assert 0 < result.prefill_seconds < result.seconds


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
    expected = stock.answer(model, ids().cuda(), **ASKED)
    assert torch.equal(static.answer(model, ids().cuda(), **ASKED), expected)
    result = timed(model, lambda: stock.answer(model, ids().cuda(), **ASKED))
    assert torch.equal(result.output, expected)
    assert 0 < result.prefill_seconds < result.seconds

"""Weights are packed in place where that pays, and given back to whoever needs them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from selfspec import attach, detach
from selfspec.weights import formats
from selfspec.weights import packing as module
from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.packing import _pays, linears_of, pack
from tests.fakes import fake_trials, new_model, packs_here, prompt
from tests.weights.test_formats import needs

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")

X = torch.ones(3, 16)


@pytest.fixture(autouse=True)
def trials(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))


def num_packed(model: nn.Module) -> int:
    return sum(type(weight) is PackedWeight for weight in model.parameters())


def test_weights_train_though_packed_and_an_optimizer_that_had_them_goes_on(model):
    other = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, other)]
    pack(model)
    for _ in range(3):
        for each, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            each(X).square().sum().backward()
            optimizer.step()
        pack(model)
        assert num_packed(model) == 2
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours + 0, theirs)


def test_a_head_that_shares_its_weight_with_the_embedding_is_packed_and_both_get_it_back():
    model = new_model(tie_word_embeddings=True)
    weight = model.get_input_embeddings().weight
    values, ids = weight.detach().clone(), torch.tensor([[3, 4]])
    expected = model(ids).logits
    assert pack(model) is None
    assert model.lm_head.weight is model.get_input_embeddings().weight is weight
    assert type(weight) is PackedWeight
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
        assert type(weight) is PackedWeight
        weight.mul_(2)
    assert type(weight) is nn.Parameter
    assert torch.equal(model.lm_head.weight, 2 * values)
    pack(model)
    model.get_input_embeddings()(ids).sum().backward()  # Somebody trains the embedding.
    assert weight.grad is not None


def test_weights_that_share_memory_are_left_alone(model):
    whole = torch.randn(24 * 16 * 2)
    model[0].weight.data = whole[: 24 * 16].view(24, 16)
    model[1].weight.data = whole[24 * 16 :].view(16, 24)
    assert pack(copy.deepcopy(model)) is None
    model.register_buffer("mine", whole[-5:])  # Such as a flat parameter of FSDP.
    pack(model)
    assert [type(layer.weight) is PackedWeight for layer in model] == [True, False]
    model.mine.zero_()
    assert not model[1].weight[-1, -5:].any()


def transposed(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn(16, 24).T


def of_a_class_of_its_own(layer: nn.Linear) -> None:
    class Special(nn.Linear):
        pass

    layer.__class__ = Special


LEFT_ALONE: dict[str, Callable[[nn.Linear], Any]] = {
    "transposed": transposed,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.9),
    "quantised": of_a_class_of_its_own,
    "with a forward of its own": lambda layer: vars(layer).update(forward=lambda x: x),
    "compiled": lambda layer: setattr(layer, "_compiled_call_impl", lambda x: x),
    "on meta": lambda layer: layer.to("meta"),
    "in float64": lambda layer: layer.double(),
}
REASONS = {
    "transposed": "not contiguous",
    "compiled": "it is compiled",
    "on meta": "are for a CPU (got device 'meta')",
    "in float64": "no packed products of torch.float64",
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_torch_cannot_pack_is_left_alone_with_a_reason(name):
    layer = nn.Linear(16, 24)
    LEFT_ALONE[name](layer)
    assert REASONS.get(name, "no large layer is torch's own") in str(pack(nn.Sequential(layer)))
    assert not isinstance(layer.weight, PackedWeight)


def test_a_weight_that_no_format_can_hold_is_left_alone(monkeypatch):
    """As one with a NaN, of which there is no float16 copy."""
    needs(formats.pack_float16, torch.bfloat16)
    monkeypatch.setattr(module, "packer_for", lambda dtype: formats.pack_float16)
    layers = (nn.Linear(16, 24, dtype=torch.bfloat16) for _ in range(2))
    model = nn.Sequential(*layers)
    model[0].weight.data[3, 4] = torch.nan
    assert pack(model) is None
    assert [type(layer.weight) is PackedWeight for layer in model] == [False, True]
    assert "don't come back" in str(pack(nn.Sequential(model[0])))


def test_it_must_pay_and_what_looks_slow_beside_another_program_is_timed_again(monkeypatch):
    for shares, packs in (((1.0, 0.5), True), ((1.0,), False)):
        fake_trials(monkeypatch, *shares)
        reason = pack(nn.Sequential(nn.Linear(16, 24)))
        assert (reason is None) == packs
        assert packs or "does not pay on this machine" in str(reason)


@pytest.mark.parametrize(
    ("shares", "pays"),
    [((0.5, 0.5), True), ((0.95, 0.95), False), ((1.5, 0.3), False), ((1.1, 0.3), True)],
)
def test_it_pays_where_one_token_and_eight_are_faster(shares, pays, monkeypatch):
    """And where a single token, as in plain calls, is not much slower."""

    def seconds(products: list[Any], inputs: list[torch.Tensor]) -> float:
        return 1.0 if hasattr(products[0], "func") else shares[len(inputs[0]) > 1]

    weights, before = list(torch.randn(3, 24, 16)), torch.get_rng_state()
    assert _pays(formats.reorder, weights) in (True, False)
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr(module, "_seconds", seconds)
    assert _pays(formats.reorder, weights) == pays


def test_packing_that_is_interrupted_stays_right_and_goes_on(model, monkeypatch):
    reordered, expected = formats.reordered, model(X)

    def interrupted(weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[1] == 24:
            raise KeyboardInterrupt
        return reordered(weight)

    with monkeypatch.context() as during:
        during.setattr(module, "_AT_ONCE", 1)
        during.setattr(formats, "reordered", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack(model)
    assert num_packed(model) == 1
    pack(model)
    assert num_packed(model) == 2
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-5)


def test_attach_packs_and_detach_gives_back(caplog):
    model = new_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters, expected = list(model.parameters()), model(**prompt()).logits
    attach(model, pack=True)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(model(**prompt()).logits, expected, rtol=1e-5, atol=1e-5)
    for more in ({}, {"pack": True}):
        attach(model, **more)
        assert num_packed(model) == len(linears_of(model))
    detach(model)
    assert num_packed(model) == 0
    assert all(torch.equal(model.state_dict()[name], old) for name, old in before.items())
    assert not caplog.records


def test_attach_says_in_a_sentence_why_it_packs_nothing(caplog):
    model = new_model().double()
    with caplog.at_level(logging.WARNING, "selfspec"):
        assert attach(model, pack=True) is model
    (record,) = caplog.records
    assert "weights of LlamaForCausalLM are not packed: torch has no packed" in record.message
    assert callable(vars(model)["generate"])

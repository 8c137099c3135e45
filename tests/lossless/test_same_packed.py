"""Packed weights: the same text in float32 with drafts and without, whoever changes them."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from selfspec import SelfSpec, attach, detach
from selfspec.weights.packing import is_packed_in_place
from tests.fakes import fake_trials, new_model, packs_here, prompt
from tests.lossless.same import (
    GREEDY,
    Call,
    assert_clean,
    assert_same_ids,
    doubting,
    run,
    run_both,
    slow,
)

pytestmark = [
    pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights"),
    pytest.mark.usefixtures("packs_at_once"),
]
SHORTLY: dict[str, Any] = {**GREEDY, "max_new_tokens": 8}


def packed_model(name: str = "llama", **changes: Any) -> Any:
    model = attach(new_model(name, **changes), pack=True)
    assert num_packed(model)
    return model


def num_packed(model: nn.Module) -> int:
    return sum(map(is_packed_in_place, model.modules()))


KINDS = {"llama": {}, "tied": {"tie_word_embeddings": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_the_model_before_it_was_packed(kind: str, call: Call) -> None:
    stock = run(new_model(**KINDS[kind]), call.inputs, **call.options)
    model = packed_model(**KINDS[kind])
    number, spec = num_packed(model), doubting(stock.ids, call.inputs)
    both = run_both(model, call.inputs, spec, **call.options)
    assert_same_ids(both.stock.ids, stock.ids)
    assert (both.stats.forward, both.stats.packing_note) == ("packed", None)
    assert "packed forwards" in str(both.stats)
    assert num_packed(model) == number
    assert_clean(detach(model))


def test_a_model_that_could_be_packed_is_told_so_until_that_was_tried() -> None:
    model = attach(new_model())
    stats = run_both(model, prompt(), SelfSpec(), drafts=False, **SHORTLY).stats
    assert stats.forward == "eager"
    assert "weights are not packed: attach(model, pack=True) makes" in str(stats)


def test_where_it_does_not_pay_nobody_is_told_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch, 1.0)
    model = attach(new_model(), pack=True)
    assert not num_packed(model)
    stats = run_both(model, prompt(), SelfSpec(), drafts=False, **SHORTLY).stats
    assert (stats.forward, stats.eager_reason, stats.packing_note) == ("eager", None, None)


def pruned(_model: Any, layer: nn.Linear) -> None:
    if "weight_orig" in dict(layer.named_parameters()):
        prune.remove(layer, "weight")
    elif layer.weight.is_contiguous():  # torch prunes no other.
        prune.l1_unstructured(layer, "weight", 0.5)


def swapped(model: Any, layer: nn.Linear) -> None:
    others = [m for m in model.modules() if type(m) is nn.Linear and m is not layer]
    other = next((m for m in others if m.weight.shape == layer.weight.shape), layer)
    for name in (name for name, _ in layer.named_parameters() if name == "weight"):
        if isinstance(getattr(other, name), nn.Parameter):
            layer.weight.data, other.weight.data = other.weight.data, layer.weight.data


def set_weight(layer: nn.Linear, weight: torch.Tensor) -> None:
    layer.weight.data = weight


def rolled(layer: nn.Linear, by: int, dim: int) -> None:
    layer.weight.data.copy_(layer.weight.data.roll(by, dim))


def random_like(weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(weight.shape) * 0.3


Edit = Callable[[Any, nn.Linear], Any]
# In ways that torch mostly counts nowhere, as adapters' are when they are merged.
EDITS: dict[str, Edit] = {
    "pruned": pruned,
    "swapped": swapped,
    "transposed": lambda _, layer: set_weight(layer, random_like(layer.weight.T).T),
    "contiguous again": lambda _, layer: set_weight(layer, layer.weight.data.contiguous()),
    "scaled": lambda _, layer: layer.weight.data.mul_(-2).clamp_(-1, 1),
    "columns rolled": lambda _, layer: rolled(layer, layer.in_features // 2, 1),
    "rows rolled": lambda _, layer: rolled(layer, 1, 0),
    "columns negated": lambda _, layer: layer.weight.data[:, 1:9:2].neg_(),
    "in bfloat16 and back": lambda model, _: model.bfloat16().float(),
    "resized": lambda model, _: model.resize_token_embeddings(
        model.config.vocab_size + 8, mean_resizing=False
    ),
    "loaded": lambda model, _: model.load_state_dict(
        {name: -each for name, each in model.state_dict().items()}
    ),
    "tied": lambda model, _: setattr(model.lm_head, "weight", model.get_input_embeddings().weight),
    "untied": lambda model, _: setattr(
        model.lm_head, "weight", nn.Parameter(random_like(model.lm_head.weight))
    ),
}


def in_float64(model: Any, layer: nn.Linear) -> None:
    model.double()
    layer.weight.data.neg_()


@pytest.mark.parametrize("edit", [*EDITS.values(), in_float64], ids=[*EDITS, "in float64"])
def test_an_edited_model_is_not_computed_from_old_weights(edit: Edit) -> None:
    models = new_model(), packed_model()
    for model in models:
        torch.manual_seed(3)
        edit(model, model.model.layers[0].mlp.down_proj)
    stock = run(models[0], prompt(), **SHORTLY).ids
    both = run_both(models[1], prompt(), SelfSpec(), drafts=False, **SHORTLY)
    assert_same_ids(both.stock.ids, stock)


@pytest.mark.parametrize("seed", [0, 1, *map(slow, range(2, 6))])
def test_any_edits_one_after_the_other(seed: int) -> None:
    chance, models, packed = random.Random(seed), [new_model(), packed_model()], 0
    for _ in range(20):
        for _ in range(chance.randrange(1, 4)):
            edit, layer, draw = chance.choice([*EDITS.values()]), chance.random(), chance.random()
            for model in models:
                torch.manual_seed(int(1e6 * draw))
                inside = [m for m in model.model.modules() if type(m) is nn.Linear]
                edit(model, inside[int(layer * len(inside))])
        is_pruned = any("weight_orig" in name for name, _ in models[0].named_parameters())
        if chance.random() < 0.3 and not is_pruned:  # torch copies no pruned layer.
            models = [copy.deepcopy(model) for model in models]
        if chance.random() < 0.7:
            attach(models[1], pack=True)
        packed += num_packed(models[1]) > 0
        stock = run(models[0], prompt(seed=seed), **SHORTLY).ids
        both = run_both(models[1], prompt(seed=seed), SelfSpec(), drafts=False, **SHORTLY)
        assert_same_ids(both.stock.ids, stock)
    assert packed > 5


def test_chains_are_packed_too() -> None:
    both = run_both(packed_model("bloom"), prompt(), SelfSpec(), drafts=False, **GREEDY)
    assert both.stats.forward == "packed"


def test_half_precision_has_one_text_from_the_first_call_on() -> None:
    """Weights were packed by the clock once, so that a text depended on when that was."""
    model, spec = packed_model(dtype=torch.bfloat16), SelfSpec(learning="request", budget="fixed")
    texts = [run(model, prompt(), assistant=spec, **GREEDY).ids for _ in range(4)]
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert spec.stats.forward == "packed"


def merged(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        weight.data += torch.zeros(len(weight), 1) @ torch.ones(1, weight.shape[1])


def trained(model: Any) -> None:
    model(**prompt()).logits.sum().backward()
    model.zero_grad()


NEIGHBOURS: dict[str, Callable[[Any], Any]] = {
    "trains": trained,
    "reads .data": lambda model: [weight.data for weight in model.parameters()],
    "saves": lambda model: model.state_dict(),
    "moves": lambda model: model.to("cpu", torch.float32),
    "merges": merged,
}


@pytest.mark.parametrize("work", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_another_thread_that_needs_the_weights_meanwhile_changes_no_text(
    work: Callable[[Any], Any],
) -> None:
    """It leaves their values as they are, and comes in the midst of a text."""
    stock, model, errors = run(new_model(), prompt(), **GREEDY).ids, packed_model(), []
    may_start = threading.Event()

    def beside() -> None:
        may_start.wait(10)
        try:
            with torch.enable_grad():
                work(model)
        except BaseException as error:
            errors.append(error)

    def on_step(_record: object) -> None:
        may_start.set()

    other, spec = threading.Thread(target=beside), SelfSpec()
    other.start()
    with spec.listening(on_step):
        for _ in range(3):
            assert_same_ids(run(model, prompt(), assistant=spec, **GREEDY).ids, stock)
    other.join(10)
    assert errors == []
    assert_same_ids(run(model, prompt(), **GREEDY).ids, stock)

"""Packed weights: the same text in float32 with drafts and without, whoever changes them."""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from selfspec import SelfSpec, attach, detach, load
from selfspec.weights.packing import is_packed_in_place
from tests.fakes import fake_trials, new_model, packs_here, prompt, with_lora
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
from tests.lossless.test_same_entrances import PEFT_NOTE
from tests.streamed import saved_model

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


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(("name", "changes"), [("llama", {}), ("llama", TIED), ("bloom", {})])
def test_the_text_is_that_of_the_model_before_it_was_packed(
    name: str, changes: dict[str, Any], call: Call
) -> None:
    stock = run(new_model(name, **changes), call.inputs, **call.options)
    model = packed_model(name, **changes)
    number, spec = num_packed(model), doubting(stock.ids, call.inputs)
    both = run_both(model, call.inputs, spec, drafts=name != "bloom", **call.options)
    assert_same_ids(both.stock.ids, stock.ids)
    assert (both.stats.forward, both.stats.packing_note) == ("packed", None)
    assert "packed forwards" in str(both.stats)
    assert num_packed(model) == number
    assert_clean(detach(model))


@pytest.mark.parametrize(("limit", "is_packed"), [(None, True), ("100%", False)])
def test_a_model_that_is_loaded_saves_what_it_was_loaded_from(
    limit: str | None, is_packed: bool, tmp_path: Path
) -> None:
    """Where memory is limited, a head that shares its weight is not packed."""
    stock = run(saved_model(tmp_path, **TIED), prompt(), **GREEDY).ids
    model = load(str(tmp_path), limit)
    both = run_both(model, prompt(), SelfSpec(), drafts=False, **GREEDY)
    assert_same_ids(both.stock.ids, stock)
    assert both.stats.forward == "packed"
    assert is_packed_in_place(model.lm_head) == is_packed
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "again")
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "model.safetensors").read_bytes()


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


def trained(model: Any, _layer: nn.Linear) -> None:
    model.requires_grad_(True)
    model(**prompt()).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.model.layers.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.01 * weight.grad


def with_a_gradient_at_the_input(model: Any, _layer: nn.Linear) -> None:
    """As adapters and prompts that are learned have it."""
    embedded = model.get_input_embeddings()(prompt()["input_ids"]).detach().requires_grad_(True)
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.abs().sum() > 0


def under_autocast(model: Any, _layer: nn.Linear) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(**prompt())


def with_an_adapter(model: Any, _layer: nn.Linear) -> None:
    wrapped = with_lora(model)
    run(model, prompt(), **SHORTLY)
    assert wrapped.merge_and_unload() is model


WORK: dict[str, Edit] = {
    **EDITS,
    "in float64": in_float64,
    "read": lambda _, layer: layer.weight.isfinite(),
    "pickled": lambda model, _: torch.save(model, io.BytesIO()),
    "copied": lambda model, _: model.load_state_dict(copy.deepcopy(model).state_dict()),
    "trained": trained,
    "with a gradient at the input": with_a_gradient_at_the_input,
    "under autocast": under_autocast,
    "with an adapter": with_an_adapter,
}


@pytest.mark.filterwarnings(PEFT_NOTE)
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_model_is_computed_from_the_weights_that_it_has_after_any_work(work: Edit) -> None:
    """Whoever needs weights gets them back, and no later call packs them again."""
    models = new_model(), packed_model()
    before = num_packed(models[1])
    for model in models:
        torch.manual_seed(3)
        work(model, model.model.layers[0].mlp.down_proj)
    stock = run(models[0], prompt(), **SHORTLY).ids
    both = run_both(models[1], prompt(), SelfSpec(), drafts=False, **SHORTLY)
    assert_same_ids(both.stock.ids, stock)
    assert num_packed(models[1]) < before
    for name, weight in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], weight)


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 6))])
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


NEIGHBOURS: dict[str, Callable[[Any], Any]] = {
    "trains": lambda model: model(**prompt()).logits.sum().backward(),
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

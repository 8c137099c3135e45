"""Packed weights: the same text in float32, in calls that use them and in others."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import prune

from selfspec import SelfSpec
from selfspec.weights import Packing, formats
from tests.fakes import fake_trials, new_model, packs_here, prompt, tiny_model
from tests.lossless.same import FIXED, GREEDY, MODES, assert_clean, doubting, run, run_both, slow

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", ["packed", "eager"])
def test_packed_or_not(forward: str, mode: str) -> None:
    model, spec = tiny_model(), partial(doubting, forward=forward, **FIXED)
    both = run_both(model, prompt(2), spec, **MODES[mode])
    assert (both.stats.forward, both.stats.eager_reason) == (forward, None)
    assert ("packed forwards, 0 MB of copies" in str(both.stats)) == (both.stats.packed_bytes > 0)
    assert_clean(model)


def test_a_fixed_budget_packs_nothing_unasked() -> None:
    """Its text depends on no clock, and in half precision packing could move it."""
    spec = SelfSpec(**FIXED)
    assert run_both(tiny_model(), prompt(), spec, **GREEDY).stats.forward == "eager"


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
def test_an_edited_model_is_not_computed_from_old_copies(edit: Edit) -> None:
    model, spec = new_model(), SelfSpec(forward="packed")
    assert run_both(model, prompt(), spec, drafts=False, **GREEDY).stats.packed_bytes
    edit(model, model.model.layers[0].mlp.down_proj)
    run_both(model, prompt(), SelfSpec(forward="packed"), drafts=False, **GREEDY)


@pytest.mark.parametrize("seed", [0, 1, *map(slow, range(2, 6))])
def test_any_edits_one_after_the_other(seed: int) -> None:
    chance, model, packed = random.Random(seed), new_model(), 0
    torch.manual_seed(seed)
    for _ in range(20):
        copies = Packing.of(model)  # Those of one call are there in the next one.
        for _ in range(chance.randrange(1, 4)):
            inside = [module for module in model.model.modules() if type(module) is nn.Linear]
            chance.choice([*EDITS.values()])(model, chance.choice(inside))
        is_pruned = any("weight_orig" in name for name, _ in model.named_parameters())
        if chance.random() < 0.3 and not is_pruned:  # torch copies no pruned layer.
            model = copy.deepcopy(model)
        spec, few = SelfSpec(forward="packed"), {"max_new_tokens": 8, "do_sample": False}
        run_both(model, prompt(seed=seed), spec, drafts=False, **few)
        packed += copies.num_bytes > 0
    assert packed > 10


def test_chains_are_packed_too() -> None:
    spec = SelfSpec(forward="packed")
    both = run_both(tiny_model("bloom"), prompt(), spec, drafts=False, **GREEDY)
    assert both.stats.forward == "packed"


def test_where_nothing_pays_it_goes_on_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch, pays=False)
    model, inputs = new_model(), prompt()
    auto = run_both(model, inputs, SelfSpec(strict=True), drafts=False, **GREEDY)
    assert (auto.stats.forward, auto.stats.eager_reason) == ("eager", None)
    asked = run_both(model, inputs, SelfSpec(forward="packed"), drafts=False, **GREEDY)
    assert (
        asked.stats.eager_reason == "no layer can be packed, or none is at least 10 % faster packed"
    )


def test_stock_beside_it_in_another_thread_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that come out wrong where they are packed: the other thread never sees one."""
    formats.packers_for(torch.float32)  # tries products while these are right
    monkeypatch.setattr(
        formats, "reordered_product", lambda x, packed, bias: -linear(x, packed.to_dense(), bias)
    )
    model, inputs = new_model(), prompt()
    stock, texts = run(model, inputs, **GREEDY), []
    may_start = threading.Event()

    def decode() -> None:
        may_start.wait(10)
        texts.append(run(model, inputs, **GREEDY).ids)

    def on_step(_record: object) -> None:
        may_start.set()
        if other.is_alive():
            other.join(10)

    other, spec = threading.Thread(target=decode), SelfSpec(forward="packed")
    other.start()
    with spec.listening(on_step):
        ours = run(model, inputs, custom_generate=spec, **GREEDY)
    other.join(10)
    assert torch.equal(texts[0], stock.ids)
    assert not torch.equal(ours.ids, stock.ids)

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

from selfspec import SelfSpec, SpecConfig, UnsupportedError
from selfspec.run.packed import Packing
from selfspec.run.packed import copies as packed_copies
from selfspec.run.packed import packing as packing_module
from selfspec.run.profile import profile
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


def test_packing_waits_until_it_has_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward saves half of its time, and packing takes as long as some thirty forwards."""
    fake_trials(monkeypatch, saves=0.5, packing=16)
    model, spec = new_model(), SelfSpec(max_nodes=1)
    forwards = []
    for _ in range(3):
        run_both(model, prompt(), spec, drafts=False, max_new_tokens=24, do_sample=False)
        forwards.append(spec.stats.forward)
    assert forwards == ["eager", "packed", "packed"]


def test_a_long_answer_is_packed_for_in_its_midst(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch, saves=0.5, packing=4)
    model, spec = new_model(), SelfSpec()
    both = run_both(model, prompt(2), spec, drafts=False, max_new_tokens=24, do_sample=True)
    assert both.stats.forward == "packed"
    assert both.stats.seconds["prepare"] > 0


def test_a_long_prompt_is_packed_for_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fake_trials(monkeypatch, saves=0.5, packing=1)
    inputs = prompt(length=200)
    spec = SelfSpec()
    both = run_both(new_model(), inputs, spec, drafts=False, max_new_tokens=1, do_sample=False)
    assert tried
    assert both.stats.packed_bytes


def test_a_fixed_budget_packs_nothing_unasked() -> None:
    """Its text depends on no clock, and in half precision packing could move it."""
    spec = SelfSpec(**FIXED)
    assert run_both(tiny_model(), prompt(), spec, **GREEDY).stats.forward == "eager"


def test_copies_that_do_not_fit_are_not_made_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "free_memory", lambda: 0.0)
    both = run_both(new_model(), prompt(), SelfSpec(), drafts=False, **GREEDY)
    assert (both.stats.forward, both.stats.eager_reason) == ("eager", None)
    asked = SelfSpec(forward="packed")
    assert run_both(new_model(), prompt(), asked, drafts=False, **GREEDY).stats.packed_bytes


def test_weights_that_changed_between_two_calls_are_packed_anew() -> None:
    """In ways that torch counts nowhere, as adapters' are when they are merged."""
    model, spec = new_model(), SelfSpec(forward="packed")
    texts = [run_both(model, prompt(), spec, drafts=False, **GREEDY).stock.ids]
    for layer in (model.model.layers[0].mlp.up_proj, model.lm_head):
        layer.weight.data += torch.randn_like(layer.weight)
        texts.append(run_both(model, prompt(), spec, drafts=False, **GREEDY).stock.ids)
    assert not torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[1], texts[2])


def pruned(_model: Any, layer: nn.Linear) -> None:
    if "weight_orig" in dict(layer.named_parameters()):
        prune.remove(layer, "weight")
    else:
        prune.l1_unstructured(layer, "weight", 0.5)


def transposed(_model: Any, layer: nn.Linear) -> None:
    layer.weight.data = torch.randn(layer.weight.shape[::-1]).mul(0.3).T


def contiguous_again(_model: Any, layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.contiguous()


def scaled(_model: Any, layer: nn.Linear) -> None:
    layer.weight.data.mul_(-2).clamp_(-1, 1)


def with_columns_rolled(_model: Any, layer: nn.Linear) -> None:
    layer.weight.data.copy_(layer.weight.data.roll(layer.in_features // 2, 1))


def with_rows_rolled(_model: Any, layer: nn.Linear) -> None:
    layer.weight.data.copy_(layer.weight.data.roll(1, 0))


def with_columns_negated(_model: Any, layer: nn.Linear) -> None:
    layer.weight.data[:, [1, 3, 5, 7]] *= -1


def in_float64(model: Any, layer: nn.Linear) -> None:
    model.double()
    layer.weight.data.mul_(-1)


def in_bfloat16_and_back(model: Any, _layer: nn.Linear) -> None:
    model.bfloat16()
    model.float()


def resized(model: Any, _layer: nn.Linear) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)


def loaded(model: Any, _layer: nn.Linear) -> None:
    model.load_state_dict({name: -each for name, each in model.state_dict().items()})


def tied(model: Any, _layer: nn.Linear) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


def untied(model: Any, _layer: nn.Linear) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)


def swapped(model: Any, layer: nn.Linear) -> None:
    others = [m for m in model.modules() if type(m) is nn.Linear and m is not layer]
    other = next((m for m in others if m.weight.shape == layer.weight.shape), layer)
    for name in (name for name, _ in layer.named_parameters() if name == "weight"):
        if isinstance(getattr(other, name), nn.Parameter):
            layer.weight.data, other.weight.data = other.weight.data, layer.weight.data


EDITS = [
    pruned,
    transposed,
    contiguous_again,
    scaled,
    with_columns_rolled,
    with_rows_rolled,
    with_columns_negated,
    in_bfloat16_and_back,
    resized,
    loaded,
    tied,
    untied,
    swapped,
]


@pytest.mark.parametrize("edit", [*EDITS, in_float64])
def test_an_edited_model_is_not_computed_from_old_copies(
    edit: Callable[[Any, nn.Linear], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trials(monkeypatch)
    model, spec = new_model(), SelfSpec(forward="packed")
    assert run_both(model, prompt(), spec, drafts=False, **GREEDY).stats.packed_bytes
    edit(model, model.model.layers[0].mlp.down_proj)
    run_both(model, prompt(), SelfSpec(forward="packed"), drafts=False, **GREEDY)


@pytest.mark.parametrize("seed", [0, 1, 2, slow(3), slow(4), slow(5)])
def test_any_edits_one_after_the_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch)
    chance, model, packed = random.Random(seed), new_model(), 0
    torch.manual_seed(seed)
    for _ in range(20):
        copies = Packing.of(model)  # Those of one call are there in the next one.
        for _ in range(chance.randrange(1, 4)):
            inside = [module for module in model.model.modules() if type(module) is nn.Linear]
            chance.choice(EDITS)(model, chance.choice(inside))
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


def test_each_kind_of_forward_has_a_curve_of_its_own(measuring: None) -> None:
    model, keys = tiny_model(), []
    for forward in ("packed", "eager", "auto"):
        config = SpecConfig(forward=forward)
        keys.append(profile(model, config, num_columns=20, num_rows=1)[0])
    assert [key.pop("forward") for key in keys] == ["packed", "eager", "packed"]
    assert keys[0] == keys[1] == keys[2]


def test_where_nothing_pays_it_goes_on_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch, pays=False)
    model, inputs = new_model(), prompt()
    auto = run_both(model, inputs, SelfSpec(strict=True), drafts=False, **GREEDY)
    assert (auto.stats.forward, auto.stats.eager_reason) == ("eager", None)
    asked = run_both(model, inputs, SelfSpec(forward="packed"), drafts=False, **GREEDY)
    assert asked.stats.eager_reason == "no layer is at least 10 % faster packed"
    with pytest.raises(UnsupportedError, match="forward='packed' can't be had: no layer is"):
        run(model, inputs, custom_generate=SelfSpec(forward="packed", strict=True), **GREEDY)


def test_a_call_that_breaks_off_leaves_the_model_as_it_was() -> None:
    model, inputs = tiny_model(), prompt()

    def break_off(*_args: object) -> None:
        raise KeyError

    spec = SelfSpec()
    with spec.listening(break_off), pytest.raises(KeyError):
        run(model, inputs, custom_generate=spec, **GREEDY)
    assert_clean(model)
    run_both(model, inputs, spec, drafts=False, **GREEDY)


def test_stock_beside_it_in_another_thread_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that come out wrong where they are packed: the other thread never sees one."""
    monkeypatch.setattr(packed_copies, "packed_linear", lambda x, w, b, _packed: -linear(x, w, b))
    model, inputs = tiny_model(), prompt()
    stock, texts = run(model, inputs, **GREEDY), []
    may_start = threading.Event()

    def decode() -> None:
        may_start.wait(10)
        texts.append(run(model, inputs, **GREEDY).ids)

    def hear(_record: object) -> None:
        may_start.set()
        if other.is_alive():
            other.join(10)

    other, spec = threading.Thread(target=decode), SelfSpec(forward="packed")
    other.start()
    with spec.listening(hear):
        ours = run(model, inputs, custom_generate=spec, **GREEDY)
    other.join(10)
    assert torch.equal(texts[0], stock.ids)
    assert not torch.equal(ours.ids, stock.ids)

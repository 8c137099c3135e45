"""Turned products and packed weights: the same text, in calls that use them and in others."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec import SelfSpec, UnsupportedError, packs, products
from selfspec.plugin.costs import profile
from selfspec.plugin.turns import Turns
from tests.fakes import new_model, packs_here, prompt, tiny_model
from tests.lossless.same import FIXED, GREEDY, MODES, assert_clean, doubting, run, run_both

needs_packs = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", ["packed", "turned", "eager"])
def test_turned_or_not(forward: str, mode: str) -> None:
    model, inputs = tiny_model(), prompt(2)
    stock = run(model, inputs, **MODES[mode])
    spec = doubting(stock.ids, inputs, forward=forward, **FIXED)
    both = run_both(model, inputs, spec, **MODES[mode])
    assert both.stats.forward == (forward if forward != "packed" or packs_here() else "turned")
    assert both.stats.eager_reason is None or not packs_here()
    assert ("turned forwards" in str(both.stats)) == (both.stats.forward == "turned")
    assert ("packed forwards, 0 MB of copies" in str(both.stats)) == (both.stats.packed_bytes > 0)
    assert_clean(model)


@needs_packs
def test_what_fits_is_packed_by_itself_and_else_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = new_model(), SelfSpec()
    sizes = [module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear)]
    for free, forward, taken in ((4 * sum(sizes) - 4, "turned", 0), (1e9, "packed", sum(sizes))):
        monkeypatch.setattr(packs, "_free_memory", lambda free=free: free)
        both = run_both(model, prompt(), spec, drafts=False, **GREEDY)
        assert (both.stats.forward, both.stats.packed_bytes) == (forward, taken)
    monkeypatch.setattr(packs, "_free_memory", lambda: 0.0)  # what is there needs no more
    assert run_both(model, prompt(), SelfSpec(), drafts=False, **GREEDY).stats.forward == "packed"


@needs_packs
def test_weights_that_changed_between_two_calls_are_packed_anew() -> None:
    """In ways that torch counts nowhere, as adapters' are when they are merged."""
    model, spec = new_model(), SelfSpec(forward="packed")
    texts = [run_both(model, prompt(), spec, drafts=False, **GREEDY).stock.ids]
    for layer in (model.model.layers[0].mlp.up_proj, model.lm_head):
        layer.weight.data += torch.randn_like(layer.weight)
        texts.append(run_both(model, prompt(), spec, drafts=False, **GREEDY).stock.ids)
    assert not torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[1], texts[2])


def test_chains_are_turned_too() -> None:
    spec = SelfSpec(forward="turned")
    both = run_both(tiny_model("bloom"), prompt(), spec, drafts=False, **GREEDY)
    assert both.stats.forward == "turned"


def test_each_kind_of_forward_has_a_curve_of_its_own(measuring) -> None:
    model = tiny_model()
    turned, _ = profile(model, num_columns=20, num_rows=1, forward="turned")
    eager, _ = profile(model, num_columns=20, num_rows=1, forward="eager")
    auto, _ = profile(model, num_columns=20, num_rows=1)
    assert (turned.pop("forward"), eager.pop("forward")) == ("turned", "eager")
    assert auto.pop("forward") == ("packed" if packs_here() else "turned")
    assert turned == eager == auto


@pytest.mark.parametrize("forward", ["turned", "packed"])
def test_where_nothing_pays_it_goes_on_eagerly(
    forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turns, "table", lambda *_, **__: {})
    model, inputs = tiny_model(), prompt()
    auto = run_both(model, inputs, SelfSpec(strict=True), drafts=False, **GREEDY)
    assert (auto.stats.forward, auto.stats.eager_reason) == ("eager", None)
    asked = run_both(model, inputs, SelfSpec(forward=forward), drafts=False, **GREEDY)
    assert asked.stats.eager_reason == f"none of its products is faster {forward} here"
    with pytest.raises(UnsupportedError, match=f"forward='{forward}' can't be had: none of its"):
        run(model, inputs, custom_generate=SelfSpec(forward=forward, strict=True), **GREEDY)


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
    """Products that come out wrong where they are turned: the other thread never sees one."""
    monkeypatch.setitem(products._WAYS, products.TURNED, lambda x, w, b: -linear(x, w, b))
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

    other, spec = threading.Thread(target=decode), SelfSpec(forward="turned")
    other.start()
    with spec.listening(hear):
        ours = run(model, inputs, custom_generate=spec, **GREEDY)
    other.join(10)
    assert torch.equal(texts[0], stock.ids)
    assert not torch.equal(ours.ids, stock.ids)

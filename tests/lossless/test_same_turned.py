"""Turned products: the same text, in calls that turn and in those that don't."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.functional import linear

from selfspec import SelfSpec, UnsupportedError, products
from selfspec.plugin.costs import profile
from selfspec.plugin.turns import Turns
from tests.fakes import prompt, tiny_model
from tests.lossless.same import FIXED, GREEDY, MODES, assert_clean, doubting, run, run_both


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", ["auto", "turned", "eager"])
def test_turned_or_not(forward: str, mode: str) -> None:
    model, inputs = tiny_model(), prompt(2)
    stock = run(model, inputs, **MODES[mode])
    spec = doubting(stock.ids, inputs, forward=forward, **FIXED)
    both = run_both(model, inputs, spec, **MODES[mode])
    assert both.stats.forward == ("eager" if forward == "eager" else "turned")
    assert both.stats.eager_reason is None
    assert ("turned forwards" in str(both.stats)) == (forward != "eager")
    assert_clean(model)


def test_chains_are_turned_too() -> None:
    both = run_both(tiny_model("bloom"), prompt(), SelfSpec(), drafts=False, **GREEDY)
    assert both.stats.forward == "turned"


def test_turned_forwards_have_a_curve_of_their_own(measuring) -> None:
    model = tiny_model()
    turned, _ = profile(model, num_columns=20, num_rows=1)
    eager, _ = profile(model, num_columns=20, num_rows=1, forward="eager")
    assert (turned.pop("forward"), eager.pop("forward")) == ("turned", "eager")
    assert turned == eager


def test_where_nothing_pays_it_goes_on_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "table", lambda *_: {})
    model, inputs = tiny_model(), prompt()
    auto = run_both(model, inputs, SelfSpec(strict=True), drafts=False, **GREEDY)
    assert (auto.stats.forward, auto.stats.eager_reason) == ("eager", None)
    asked = run_both(model, inputs, SelfSpec(forward="turned"), drafts=False, **GREEDY)
    assert asked.stats.eager_reason == "none of its products is faster turned here"
    with pytest.raises(UnsupportedError, match=r"forward='turned' can't be had: none of its"):
        run(model, inputs, custom_generate=SelfSpec(forward="turned", strict=True), **GREEDY)


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
    monkeypatch.setattr(products, "turned", lambda x, w, b: -linear(x, w, b))
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

    other, spec = threading.Thread(target=decode), SelfSpec()
    other.start()
    with spec.listening(hear):
        ours = run(model, inputs, custom_generate=spec, **GREEDY)
    other.join(10)
    assert torch.equal(texts[0], stock.ids)
    assert not torch.equal(ours.ids, stock.ids)

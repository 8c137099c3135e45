"""Budgets, measured or fixed, change no token; and a measured one is found again."""

from __future__ import annotations

import pytest

from selfspec import SelfSpec
from selfspec.cost import CostBook, CostCurve
from selfspec.plugin.costs import Costs
from tests.fakes import prompt, tiny_model
from tests.lossless.same import GREEDY, MODES, ROWS_AND_MODES, doubting, run, run_both
from tests.zoo import BRANCHING


def with_curve(spec: SelfSpec, curve: CostCurve) -> SelfSpec:
    """A `SelfSpec` that takes a curve for measured, whatever is asked of it."""
    spec._costs.curve = lambda *_args: curve  # type: ignore[method-assign]
    return spec


FLAT = CostCurve({1: 1.0, 64: 1.01})
STEEP = CostCurve({1: 1.0, 64: 64.0})
STAIRS = CostCurve({1: 1.0, 4: 1.0, 5: 2.0, 8: 2.0, 9: 4.0, 64: 9.0})


@pytest.mark.parametrize(("num_rows", "mode"), ROWS_AND_MODES)
@pytest.mark.parametrize("curve", [FLAT, STEEP, STAIRS], ids=["flat", "steep", "stairs"])
def test_whatever_a_forward_costs(curve: CostCurve, num_rows: int, mode: str) -> None:
    model, inputs = tiny_model("mistral"), prompt(num_rows)
    stock = run(model, inputs, **MODES[mode])
    curve = CostCurve.from_dict(curve.as_dict())
    spec = with_curve(doubting(stock.ids, inputs, max_nodes=24, budget="measured"), curve)
    run_both(model, inputs, spec, drafts=False, **MODES[mode])


@pytest.mark.parametrize("name", BRANCHING)
def test_measured_on_every_architecture(name: str, measuring) -> None:
    model, inputs = tiny_model(name), prompt(3)
    spec = SelfSpec(budget="measured", max_nodes=64)
    for _ in range(2):
        run_both(model, inputs, spec, drafts=False, **MODES["sample"])


def test_what_costs_nothing_is_drafted_wide_and_what_costs_much_is_not() -> None:
    model, inputs = tiny_model(), prompt()
    stock = run(model, inputs, **GREEDY)
    widths = {}
    for name, curve in (("flat", FLAT), ("steep", STEEP)):
        curve = CostCurve.from_dict(curve.as_dict())
        curve.refine = lambda *_args: None  # type: ignore[method-assign]
        spec = with_curve(doubting(stock.ids, inputs, max_nodes=24, budget="measured"), curve)
        run(model, inputs, custom_generate=spec, **GREEDY)
        widths[name] = spec.stats.nodes_per_step
    assert widths["flat"] > 12
    assert widths["steep"] < 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["falcon-alibi", "bloom", "gpt-neo"])
def test_chains_are_measured_too(name: str, mode: str, measuring) -> None:
    spec = SelfSpec()
    for num_rows in (1, 3):
        both = run_both(tiny_model(name), prompt(num_rows), spec, drafts=False, **MODES[mode])
        assert both.stats.seconds["profile"] > 0


def test_a_curve_is_measured_once_for_a_model_and_found_again(measuring, monkeypatch) -> None:
    model, measured = tiny_model(), []
    measure = CostCurve.measure

    def counted(run_width, *args, **kwargs):
        measured.append(1)
        return measure(run_width, *args, **kwargs)

    monkeypatch.setattr(CostCurve, "measure", counted)
    for _ in range(2):
        spec = SelfSpec(max_nodes=16)
        for _ in range(2):
            run(model, prompt(), custom_generate=spec, **GREEDY)
    assert len(measured) == 1
    run(tiny_model("qwen2"), prompt(), custom_generate=spec, **GREEDY)
    assert len(measured) == 2
    run(model, prompt(3), custom_generate=spec, **GREEDY)
    assert len(measured) == 3
    wider = SelfSpec(max_nodes=32)
    run(model, prompt(3), custom_generate=wider, **GREEDY)
    assert len(measured) == 4


def test_what_is_too_slow_to_be_measured_is_not_tried_in_every_call(measuring, monkeypatch) -> None:
    model, measured = tiny_model(), []

    def slowly(_run: object, widths: object, **_more: object) -> CostCurve:
        measured.append(widths)
        return CostCurve({1: 1.0, 2: 1.2})

    monkeypatch.setattr(CostCurve, "measure", slowly)
    for _ in range(2):
        spec = SelfSpec()
        for _ in range(2):
            run(model, prompt(), custom_generate=spec, **GREEDY)
    assert len(measured) == 1


def test_without_a_folder_it_is_measured_for_each_spec(tmp_path, measuring) -> None:
    spec = SelfSpec(budget="measured")
    spec._costs = Costs(CostBook(tmp_path / "file" / "that" / "is" / "none"))
    (tmp_path / "file").write_text("")
    run_both(tiny_model(), prompt(), spec, drafts=False, **GREEDY)
    assert spec.stats.seconds["profile"] > 0

"""Copies are of the weights as they are, shared, freed with who used them, and fit the memory."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec.run.packed import PackedWeights, weights
from tests.fakes import packs_here

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")

SIZE = 4 * 16 * 24  # bytes of a layer
_real_pays = weights._pays


@pytest.fixture(autouse=True)
def all_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(weights, "_pays", lambda _modules: True)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)).requires_grad_(False)


def changed_rows(weight: torch.Tensor) -> None:
    weight.data[:2] = weight.data[:2].flip(0)


def changed_in_place(weight: torch.Tensor) -> None:
    weight.data += 1


def changed_at_one_index(weight: torch.Tensor) -> None:
    weight.data[3, 5] += 1e-3


def changed_as_training_does(weight: torch.Tensor) -> None:
    weight.mul_(1.5)


def changed_memory(weight: torch.Tensor) -> None:
    weight.data = 2 * weight.data


@pytest.mark.parametrize(
    "change",
    [
        changed_rows,
        changed_in_place,
        changed_at_one_index,
        changed_as_training_does,
        changed_memory,
    ],
)
def test_a_weight_that_changed_is_packed_anew(
    model: nn.Sequential, change: Callable[[torch.Tensor], None]
) -> None:
    held, x = PackedWeights(), torch.ones(3, 16)
    assert held.prepare(model) is None
    before = {module: copy.packed for module, copy in held._copies.items()}
    assert held.prepare(model) is None
    assert all(held._copies[module].packed is packed for module, packed in before.items())
    change(model[0].weight)
    assert held.prepare(model) is None
    assert held._copies[model[0]].packed is not before[model[0]]
    assert held._copies[model[1]].packed is before[model[1]]
    with held.in_use():
        torch.testing.assert_close(
            model[0](x), linear(x, model[0].weight, model[0].bias), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [15, 16, 17, 18])
def test_rows_of_every_length_are_summed(in_features: int, dtype: torch.dtype) -> None:
    weight = torch.ones(3, in_features, dtype=dtype)
    sums = weights._row_sums(weight)
    weight[1, -1] += 0.5
    assert (weights._row_sums(weight) != sums).tolist() == [False, True, False]


def test_all_who_use_a_model_share_its_copies_and_the_last_one_frees_them(
    model: nn.Sequential,
) -> None:
    one, other = PackedWeights.of(model), PackedWeights.of(model)
    assert one is other
    assert PackedWeights.of(nn.Sequential(*model)) is not one
    known = weakref.ref(one)
    del one, other
    gc.collect()
    assert known() is None


def test_a_layer_that_is_gone_holds_no_copy() -> None:
    held, model = PackedWeights(), nn.Sequential(nn.Linear(16, 24))
    held.prepare(model)
    assert held.num_bytes == SIZE
    del model
    gc.collect()
    assert held.num_bytes == 0


@pytest.mark.parametrize(("available", "fits"), [(4 * 2 * SIZE, True), (8 * SIZE - 4, False)])
def test_a_quarter_of_the_free_memory_is_enough(
    available: int, fits: bool, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    held = PackedWeights()
    reason = held.prepare(model)
    assert (reason is None) is fits
    if reason is not None:
        assert "too much of what is free" in reason
    assert held.prepare(model, whatever_memory=True) is None
    free.available = 0
    assert held.prepare(model) is None  # It is there already.


@pytest.mark.parametrize(
    ("limit", "fits"), [("max", True), (str(1000 + 8 * SIZE), True), ("7000", False), (None, True)]
)
def test_a_container_has_a_limit_of_its_own(
    limit: str | None,
    fits: bool,
    model: nn.Sequential,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1e9))
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000\n")
    assert (PackedWeights().prepare(model) is None) is fits


def test_only_what_pays_is_packed(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pays(modules: list[nn.Linear]) -> bool:
        asked.append(modules)
        return modules[0].in_features == 16

    monkeypatch.setattr(weights, "_pays", pays)
    held = PackedWeights()
    assert held.prepare(model) is None
    assert list(held._copies) == [model[0]]
    held.prepare(model)
    assert len(asked) == 2  # Once for each kind of layer.
    monkeypatch.setattr(weights, "_pays", lambda _modules: False)
    assert PackedWeights().prepare(model) == "no layer is at least 10 % faster packed"


def test_a_trial_times_both_ways_and_draws_nothing(model: nn.Sequential) -> None:
    before = torch.get_rng_state()
    assert _real_pays([model[0]]) in (True, False)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("ratio", "pays"), [(0.85, True), (0.95, False)])
def test_ten_per_cent_is_the_least(
    ratio: float, pays: bool, model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(layers: list[object], _x: torch.Tensor) -> float:
        return 1.0 if isinstance(layers[0], nn.Linear) else ratio

    monkeypatch.setattr(weights, "_seconds", seconds)
    assert _real_pays([model[0]]) is pays


def test_what_only_looks_like_a_linear_layer_is_left_alone(model: nn.Sequential) -> None:
    class Special(nn.Linear):
        pass

    hooked = nn.Linear(16, 24)
    vars(hooked)["forward"] = lambda x: x
    assert weights._kinds_of(nn.Sequential(Special(16, 24), hooked, nn.ReLU())) == {}
    compiled = nn.Sequential(nn.Linear(16, 24))
    compiled._compiled_call_impl = lambda x: x  # type: ignore[assignment]
    assert weights._kinds_of(compiled) == {}


def test_it_is_used_inside_and_in_this_thread_alone(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "packed_linear", lambda x, w, b, _packed: -linear(x, w, b))
    held, x, elsewhere = PackedWeights(), torch.ones(1, 16), []
    held.prepare(model)
    right = model[0](x)
    with held.in_use():
        assert torch.equal(model[0](x), -right)
        thread = threading.Thread(target=lambda: elsewhere.append(model[0](x)))
        thread.start()
        thread.join()
        with held.in_use():
            assert torch.equal(model[0](x), -right)
        assert torch.equal(model[0](x), -right)
    assert torch.equal(elsewhere[0], right)
    assert torch.equal(model[0](x), right)
    assert "forward" not in vars(model[0])


def test_a_forward_that_comes_meanwhile_stays(model: nn.Sequential) -> None:
    held = PackedWeights()
    held.prepare(model)

    def theirs(x: torch.Tensor) -> str:
        return "theirs"

    with held.in_use():
        vars(model[0])["forward"] = theirs
    assert model[0](torch.ones(1, 16)) == "theirs"


def test_another_thread_may_pack_further_layers_meanwhile() -> None:
    held, failures = PackedWeights(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def pack() -> None:
        for _ in range(100):
            added.append(nn.Linear(16, 24).requires_grad_(False))
            held.prepare(nn.Sequential(added[-1]))

    added: list[nn.Linear] = []
    packing = threading.Thread(target=pack)
    packing.start()
    try:
        while packing.is_alive():
            with held.in_use():
                pass
    except RuntimeError as error:
        failures.append(error)
    finally:
        packing.join()
        sys.setswitchinterval(interval)
    assert failures == []

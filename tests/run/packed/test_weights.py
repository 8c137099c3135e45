"""Copies are of the weights as they are, shared, freed with who used them, and fit the memory."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.utils import logging

from selfspec.run.packed import PackedWeights, Packing, layers, weights
from tests.fakes import fake_trials, packs_here

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")

SIZE = 4 * 16 * 24  # bytes of a layer


@pytest.fixture(autouse=True)
def all_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch)


def packed(
    model: nn.Module, held: PackedWeights | None = None, *, whatever_memory: bool = False
) -> Packing:
    """A call's packing, with all layers packed."""
    packing = Packing(held or PackedWeights(), model)
    packing.pack(whatever_memory=whatever_memory)
    return packing


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
    assert packed(model, held).reason is None
    before = {module: slot.copy for module, slot in held.slots.items()}
    Packing(held, model)
    assert all(held.slots[module].copy is copy for module, copy in before.items())
    change(model[0].weight)
    packing = Packing(held, model)
    assert held.slots[model[0]].copy is not before[model[0]]
    assert held.slots[model[1]].copy is before[model[1]]
    with packing.in_use():
        torch.testing.assert_close(
            model[0](x), linear(x, model[0].weight, model[0].bias), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [15, 16, 17, 18])
def test_rows_of_every_length_are_summed(in_features: int, dtype: torch.dtype) -> None:
    weight = torch.ones(3, in_features, dtype=dtype)
    sums = layers.row_sums(weight)
    weight[1, -1] += 0.5
    assert (layers.row_sums(weight) != sums).tolist() == [False, True, False]


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
    packed(model, held)
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
    reason = packed(model, held).reason
    assert (reason is None) is fits
    if reason is not None:
        assert "too much of what is free" in reason
    assert packed(model, held, whatever_memory=True).reason is None
    free.available = 0
    assert packed(model, held).reason is None  # It is there already.


def test_only_what_pays_is_packed(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch, pays=False)
    no_gain = weights.trial
    tried = fake_trials(monkeypatch)
    gain = weights.trial
    monkeypatch.setattr(
        weights, "trial", lambda kind, of: (gain if kind.num_in == 16 else no_gain)(kind, of)
    )
    held = PackedWeights()
    assert packed(model, held).is_packed
    assert held.slots[model[0]].copy is not None
    assert held.slots[model[1]].copy is None
    packed(model, held)
    assert len(tried) == 1  # Once for each kind of layer.


def test_where_no_layer_gets_faster_none_is_packed(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trials(monkeypatch, pays=False)
    packing = packed(model)
    assert packing.reason == "no layer is at least 10 % faster packed"
    assert not packing.is_packed


def test_it_packs_once_it_would_have_saved_as_much_as_that_takes(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step saves half a second of each of the two layers, and packing takes 5 seconds."""
    fake_trials(monkeypatch, saves=0.5, packing=2.5)
    held = PackedWeights()
    packing = Packing(held, model)
    assert [packing.before_step(1) for _ in range(4)] == [False] * 4
    again = Packing(held, model)  # A later call goes on counting.
    assert again.before_step(1)
    assert again.is_packed
    assert not again.before_step(1)
    assert packing.before_step(1)  # The other call is told too.


def test_a_prompt_counts_before_it_is_read(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trials(monkeypatch, saves=0.5, packing=2.5)
    short, long = Packing(PackedWeights(), model), Packing(PackedWeights(), model)
    short.before_prompt(64, 1)
    long.before_prompt(64 * 5, 1)
    assert (short.is_packed, long.is_packed) == (False, True)


def test_trials_wait_until_they_are_a_small_part_of_the_work(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds, tried in 0.2 seconds each, and steps of two seconds: a tenth of that is due."""
    tried = fake_trials(monkeypatch)
    monkeypatch.setattr(weights, "price_of", lambda *_kind: 0.2)
    packing = Packing(PackedWeights(), model)
    packing.before_step(1)
    assert not tried
    packing.before_step(1)
    assert len(tried) == 2


def test_packing_that_is_interrupted_stays_right_and_goes_on(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(way: object, of: list[torch.Tensor]) -> list[object]:
        if of[0].shape[1] == 24:
            raise KeyboardInterrupt
        return really(way, of)

    really, held, x = weights.pack_all, PackedWeights(), torch.ones(2, 16)
    expected = model(x)
    with monkeypatch.context() as during:
        during.setattr(weights, "pack_all", interrupted)
        packing = Packing(held, model)
        with pytest.raises(KeyboardInterrupt):
            packing.pack()
    assert (held.num_bytes, packing.is_packed) == (SIZE, False)
    with packing.in_use():
        torch.testing.assert_close(model(x), expected)
    assert packed(model, held).is_packed


def test_what_takes_long_is_shown(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()  # Tests of eval switch it off.
    packed(model)
    assert capsys.readouterr().err == ""
    fake_trials(monkeypatch, packing=1.5)
    packed(model)
    assert "Packing weights" in capsys.readouterr().err


def test_what_only_looks_like_a_linear_layer_is_left_alone(model: nn.Sequential) -> None:
    class Special(nn.Linear):
        pass

    hooked = nn.Linear(16, 24)
    vars(hooked)["forward"] = lambda x: x
    assert layers.linears_of(nn.Sequential(Special(16, 24), hooked, nn.ReLU())) == []
    compiled = nn.Sequential(nn.Linear(16, 24))
    compiled._compiled_call_impl = lambda x: x  # type: ignore[assignment]
    assert layers.linears_of(compiled) == []


def test_it_is_used_inside_and_in_this_thread_alone(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "packed_linear", lambda x, w, b, _packed: -linear(x, w, b))
    held, x, elsewhere = packed(model), torch.ones(1, 16), []
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
    held = packed(model)

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
            packed(nn.Sequential(added[-1]), held)

    added: list[nn.Linear] = []
    packing = threading.Thread(target=pack)
    packing.start()
    try:
        while packing.is_alive():
            with Packing(held, nn.Sequential(*added)).in_use():
                pass
    except RuntimeError as error:
        failures.append(error)
    finally:
        packing.join()
        sys.setswitchinterval(interval)
    assert failures == []

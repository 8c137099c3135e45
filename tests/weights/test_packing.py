"""Weights are packed once that pays, shared, packed anew where they changed, and fit the memory."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from selfspec.weights import Packing, formats
from selfspec.weights import packing as module
from tests.fakes import FakeTrials, fake_trials, packs_here
from tests.lossless.same import in_threads
from tests.weights.test_formats import needs

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")

SIZE = 4 * 16 * 24  # bytes of a layer


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> FakeTrials:
    return fake_trials(monkeypatch)


@pytest.fixture
def model(trials: FakeTrials) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)).requires_grad_(False)


def packed(model: nn.Module) -> Packing:
    """A model's packing, with all layers packed."""
    packing = Packing.of(model)
    packing.pack()
    return packing


def assert_right(model: Any, packing: Packing, x: torch.Tensor | None = None) -> None:
    """In use, the model computes what it computes."""
    x = torch.ones(3, 16) if x is None else x
    expected = model(x)
    with packing.in_use():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not any("forward" in vars(layer) for layer in model)


def as_training_does(weight: torch.Tensor) -> None:
    weight.mul_(1.5)


def to_other_memory(weight: torch.Tensor) -> None:
    weight.data = 2 * weight.data


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "one index": lambda weight: weight.data[3, 5].add_(1e-3),
    "as training does": as_training_does,
    "to other memory": to_other_memory,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_changed_is_packed_anew(change, model):
    packing = packed(model)
    assert Packing.of(model).num_bytes == 2 * SIZE
    change(model[0].weight)
    assert Packing.of(model) is packing
    assert packing.num_bytes == SIZE
    packing.before_forward(1)
    assert packing.num_bytes == 2 * SIZE
    assert_right(model, packing, torch.randn(3, 16))


ALIASES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "a view": lambda weight: weight[3:5],
    "its data": lambda weight: weight.data,  # Torch counts no write through it.
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_a_write_through_what_was_taken_before_packing_is_seen(alias, model):
    taken = alias(model[0].weight)
    packing = packed(model)
    taken.mul_(2)
    assert Packing.of(model).num_bytes == SIZE
    assert_right(model, packing)


@pytest.mark.parametrize(("num_forwards", "is_packed"), [(4, False), (5, True)])
def test_weights_that_changed_are_packed_once_that_pays(
    num_forwards, is_packed, model, monkeypatch
):
    """As in training, where they change between any two calls."""
    fake_trials(monkeypatch, saves=0.5, packing=2.5)
    packing = packed(model)
    for _ in range(8):
        packing.before_forward(1)
    for layer in model:
        as_training_does(layer.weight)
    assert Packing.of(model) is packing
    for _ in range(num_forwards):
        assert not packing.is_packed
        packing.before_forward(1)
    assert packing.is_packed == is_packed


def transposed(module: nn.Linear) -> None:
    module.weight.data = torch.randn(16, 24).T


GONE: dict[str, Callable[[nn.Module], Any]] = {
    "on meta": lambda module: module.to("meta"),
    "transposed": transposed,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.9),
    "float64": lambda module: module.double(),
}


@pytest.mark.parametrize("change", GONE.values(), ids=GONE)
def test_the_copy_of_a_weight_that_is_no_longer_packed_is_dropped(change, model):
    packing, layer = packed(model), model[0]
    change(layer)
    assert Packing.of(model).num_bytes == SIZE
    x = torch.ones(3, 16, dtype=layer.weight.dtype, device=layer.weight.device)
    expected = layer(x)
    with packing.in_use():
        assert layer(x).device == x.device
        if x.device.type == "cpu":
            assert torch.equal(layer(x), expected)


def test_weights_that_no_format_can_hold_end_no_call(monkeypatch, trials):
    """As one with a NaN, of which there is no float16 copy."""
    needs(formats.pack_float16, torch.bfloat16)
    monkeypatch.setattr("tests.fakes.packers_for", lambda dtype: (formats.pack_float16,))
    layers = (nn.Linear(16, 24, dtype=torch.bfloat16) for _ in range(2))
    model = nn.Sequential(*layers).requires_grad_(False)
    model[0].weight.data[3, 4] = torch.nan
    packing = packed(model)
    assert (packing.is_packed, packing.num_bytes) == (True, SIZE // 2)
    with packing.in_use():
        assert model[0](torch.ones(2, 16, dtype=torch.bfloat16)).isnan().any()
    assert "no layer can be packed" in str(Packing.of(nn.Sequential(model[0])).pack())


def test_a_model_that_is_copied_in_use_is_packed_for_itself(model):
    packing = packed(model)
    with packing.in_use():
        other = copy.deepcopy(model)
    other[0].weight.mul_(-2)
    again = packed(other)
    assert again.num_bytes == packing.num_bytes
    assert_right(other, again)


def test_all_who_use_a_model_share_its_copies_and_the_last_one_frees_them(model):
    one, other = Packing.of(model), Packing.of(model)
    assert one is other
    assert Packing.of(nn.Sequential(*model)) is not one
    known = weakref.ref(one)
    del one, other
    gc.collect()
    assert known() is None


@pytest.mark.parametrize(("available", "fits"), [(4 * 2 * SIZE, True), (8 * SIZE - 4, False)])
def test_a_quarter_of_the_free_memory_is_enough(available, fits, model, monkeypatch):
    free = SimpleNamespace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    packing = Packing.of(model)
    reason = packing.pack()
    assert (reason is None) is fits
    assert fits or "too much of what is free" in str(reason)
    assert packing.pack(whatever_memory=True) is None
    free.available = 0
    assert packing.pack() is None  # It is there already.


def test_it_packs_once_it_would_have_saved_as_much_as_that_takes(model, monkeypatch):
    """A forward saves half a second of a weight, and packing it takes two and a half.

    A prompt counts as several forwards, before it is read.
    """
    fake_trials(monkeypatch, saves=0.5, packing=2.5)
    packing = Packing.of(model)
    packing.before_forward(8 * 3)
    packing.before_forward(1)
    assert not packing.packing_is_over
    again = Packing.of(model)  # A later call goes on counting.
    again.before_forward(1)
    assert again.packing_is_over
    assert again.is_packed


def test_layers_are_timed_once_that_is_a_small_part_of_the_work(model, monkeypatch):
    trials = fake_trials(monkeypatch, due=10)
    packing = Packing.of(model)
    packing.before_forward(8 * 8)
    packing.before_forward(1)
    assert not trials.timed
    packing.before_forward(1)
    assert trials.timed == [torch.float32]


def test_what_was_timed_beside_another_program_is_timed_again(model, monkeypatch):
    """It begins in the midst of the first times, and ends before the second ones."""
    trials = fake_trials(monkeypatch, pays=False)
    trials.share = 0.5
    packing = Packing.of(model)
    assert packing.pack() == "no layer can be packed, or none is at least 10 % faster packed"
    assert not packing.packing_is_over
    fake_trials(monkeypatch)
    packing.before_forward(1)
    assert packing.is_packed


def test_packing_that_is_interrupted_stays_right_and_goes_on(model, monkeypatch):
    reordered = formats.reordered

    def interrupted(weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[1] == 24:
            raise KeyboardInterrupt
        return reordered(weight)

    packing = Packing.of(model)
    with monkeypatch.context() as during:
        during.setattr(module, "_AT_ONCE", 1)
        during.setattr(formats, "reordered", interrupted)
        with pytest.raises(KeyboardInterrupt):
            packing.pack()
    assert packing.num_bytes == SIZE
    assert_right(model, packing)
    assert packed(model).num_bytes == 2 * SIZE


def test_other_threads_may_look_at_the_model_meanwhile(model):
    x, wrong = torch.randn(2, 16), []
    expected = model(x)

    def work(_index: int) -> None:
        with packed(model).in_use():
            if not torch.allclose(model(x), expected, atol=1e-5):
                wrong.append(1)

    in_threads(work, 150, 3)
    assert wrong == []
    assert not any("forward" in vars(layer) for layer in model)

"""Copies are of the weights as they are, shared, freed with who used them, and fit the memory."""

from __future__ import annotations

import copy
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
from torch.nn.utils import prune
from transformers.utils import logging

from selfspec.run.packed import PackedWeights, Packing, layers, weights
from selfspec.run.packed.layers import Origin
from selfspec.run.packed.linears import Copy, Way
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


def permuted_within_rows(weight: torch.Tensor) -> None:
    weight.data.copy_(weight.data.roll(8, 1))


def permuted_both_ways(weight: torch.Tensor) -> None:
    """An identity, which becomes a permutation: all sums of rows and of columns stay."""
    weight.data[:16] = torch.eye(16)[torch.arange(16).roll(2)]


def with_negated_columns(weight: torch.Tensor) -> None:
    """The topmost bit of an even number of words changes in each row and in each column."""
    weight.data[:, [1, 3]] *= -1


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
        permuted_within_rows,
        permuted_both_ways,
        with_negated_columns,
        changed_as_training_does,
        changed_memory,
    ],
)
def test_a_weight_that_changed_is_packed_anew(
    model: nn.Sequential, change: Callable[[torch.Tensor], None]
) -> None:
    held, x = PackedWeights(), torch.randn(3, 16)
    model[0].weight.data[:16] = torch.eye(16)
    assert packed(model, held).reason is None
    before = {module: slot.held for module, slot in held.slots.items()}
    Packing(held, model)
    assert all(held.slots[module].held is each for module, each in before.items())
    change(model[0].weight)
    packing = Packing(held, model)
    assert held.slots[model[0]].held is not before[model[0]]
    assert held.slots[model[1]].held is before[model[1]]
    with packing.in_use():
        torch.testing.assert_close(
            model[0](x), linear(x, model[0].weight, model[0].bias), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 15), (5, 16), (40, 6), (1, 17), (33, 34)], ids=str)
def test_every_value_that_changes_or_moves_is_seen(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    whole = torch.randn(shape[0] * shape[1] + 3, dtype=dtype)
    weight = whole[3:].view(shape)  # Its first value lies at an odd place.
    origin, kept = Origin.of(weight), weight.clone()
    assert Origin.of(weight) == origin
    for row, column in ((0, 0), (-1, -1), (shape[0] // 2, 1)):
        weight.data[row, column] *= -1
        assert Origin.of(weight) != origin
        weight.data[row, column] *= -1
    for dim, size in enumerate(shape):
        for distance in range(1, size):
            weight.data.copy_(kept.roll(distance, dim))
            assert Origin.of(weight) != origin
    weight.data.copy_(kept)
    assert Origin.of(weight) == origin
    assert Origin.of(weight.clone()) != origin
    weight.mul_(1)
    assert Origin.of(weight) != origin


def put_on_meta(module: nn.Module) -> None:
    module.to("meta")


def transposed(module: nn.Linear) -> None:
    module.weight.data = torch.randn(16, 24).T


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.9)


def made_float64(module: nn.Module) -> None:
    module.double()


def made_float16(module: nn.Module) -> None:
    module.half()


@pytest.mark.parametrize("change", [put_on_meta, transposed, pruned, made_float64, made_float16])
def test_the_copy_of_a_weight_that_is_no_longer_packed_is_dropped(
    model: nn.Sequential, change: Callable[[nn.Module], None]
) -> None:
    held = PackedWeights()
    packed(model, held)
    change(model[0])
    packing = Packing(held, model)
    assert held.slots[model[0]].held is None
    x = torch.ones(3, 16, dtype=model[0].weight.dtype, device=model[0].weight.device)
    expected = model[0](x)
    with packing.in_use():
        assert model[0](x).device == x.device
        if x.device.type == "cpu":
            assert torch.equal(model[0](x), expected)


@pytest.mark.parametrize("change", [changed_as_training_does, changed_memory])
def test_a_weight_that_changes_during_a_call_is_used_itself(
    model: nn.Sequential, change: Callable[[torch.Tensor], None]
) -> None:
    packing, x = packed(model), torch.ones(3, 16)
    with packing.in_use():
        change(model[0].weight)
        assert torch.equal(model[0](x), linear(x, model[0].weight, model[0].bias))


def test_a_weight_that_can_no_longer_be_packed_ends_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one with a NaN, of which there is no float16 copy."""
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(16, 24)).requires_grad_(False)
    held, really = PackedWeights(), weights.pack_all
    packed(model, held)

    def pack_all(way: Way, of: list[torch.Tensor]) -> list[Copy | None]:
        found = zip(of, really(way, of), strict=True)
        return [each if weight.isfinite().all() else None for weight, each in found]

    monkeypatch.setattr(weights, "pack_all", pack_all)
    model[0].weight.data[3, 4] = torch.nan
    packing = packed(model, held)
    assert packing.is_packed
    assert packing.num_bytes == SIZE
    with packing.in_use():
        assert model[0](torch.ones(2, 16)).isnan().any()


def test_a_model_that_is_copied_in_use_has_no_copies_yet(model: nn.Sequential) -> None:
    packing, x = packed(model), torch.ones(3, 16)
    with packing.in_use():
        other = copy.deepcopy(model)
    other[0].weight.mul_(-2)
    expected = linear(x, other[0].weight, other[0].bias)
    assert torch.equal(other[0](x), expected)
    again = packed(other)
    assert again.num_bytes == packing.num_bytes
    with again.in_use():
        torch.testing.assert_close(other[0](x), expected)
    assert "forward" not in vars(other[0])


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
    assert held.slots[model[0]].held is not None
    assert held.slots[model[1]].held is None
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

"""Copies are of the weights as they are, shared, freed with who used them, and fit the memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from selfspec import packs
from selfspec.packed import Packed
from selfspec.packs import Packs
from tests.fakes import packs_here

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")


@pytest.fixture
def module() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 24)


def outcome(module: nn.Linear, copy: torch.Tensor) -> torch.Tensor:
    x = torch.ones(1, 16)
    return Packed(copy, torch.float32)(x, module.weight, None)


def changed_rows(weight: torch.Tensor) -> None:
    weight.data[:2] = weight.data[:2].flip(0)


def changed_in_place(weight: torch.Tensor) -> None:
    weight.data += 1


def changed_in_one_place(weight: torch.Tensor) -> None:
    weight.data[3, 5] += 1e-3


def changed_as_training_does(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(1.5)


def changed_memory(weight: torch.Tensor) -> None:
    weight.data = 2 * weight.data


@pytest.mark.parametrize(
    "change",
    [
        changed_rows,
        changed_in_place,
        changed_in_one_place,
        changed_as_training_does,
        changed_memory,
    ],
)
def test_a_weight_that_changed_is_packed_anew(
    module: nn.Linear, change: Callable[[torch.Tensor], None]
) -> None:
    held = Packs()
    before = held.copies([(module,)])[module,]
    assert held.copies([(module,)])[module,] is before
    change(module.weight)
    after = held.copies([(module,)])[module,]
    assert after is not before
    torch.testing.assert_close(outcome(module, after), linear(torch.ones(1, 16), module.weight))


def test_a_group_is_packed_anew_where_one_of_it_changed(module: nn.Linear) -> None:
    group, held = (module, nn.Linear(16, 8)), Packs()
    before = held.copies([group])[group]
    assert held.copies([group])[group] is before
    changed_in_one_place(group[1].weight)
    after = held.copies([group])[group]
    assert after is not before
    both = torch.cat([each.weight for each in group])
    torch.testing.assert_close(outcome(module, after), linear(torch.ones(1, 16), both))
    assert held.copies([(module,)])[module,] is not after


def test_another_dtype_is_packed_anew_whatever_its_bits(
    module: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "_row_sums", lambda _: torch.zeros(1))
    held, here = Packs(), module.weight.data_ptr()
    before = held.copies([(module,)])[module,]
    module.weight.data = module.weight.data.to(torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: here)
    assert held.copies([(module,)])[module,] is not before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [15, 16, 17, 18])
def test_rows_of_every_length_are_summed(in_features: int, dtype: torch.dtype) -> None:
    weight = torch.ones(3, in_features, dtype=dtype)
    sums = packs._row_sums(weight)
    weight[1, -1] += 0.5
    assert (packs._row_sums(weight) != sums).tolist() == [False, True, False]


def test_all_who_use_a_model_share_its_copies_and_the_last_one_frees_them(
    module: nn.Linear,
) -> None:
    model = nn.ModuleList([module])
    one, other = Packs.of(model), Packs.of(model)
    assert one is other
    assert Packs.of(nn.ModuleList([module])) is not one
    known = weakref.ref(one)
    del one, other
    gc.collect()
    assert known() is None


def test_a_module_that_is_gone_holds_no_copy() -> None:
    held, module = Packs(), nn.Linear(16, 24)
    held.copies([(module,)])
    assert len(held._held) == 1
    del module
    gc.collect()
    assert len(held._held) == 0


@pytest.mark.parametrize(("available", "fits"), [(4 * 1536, True), (4 * 1536 - 4, False)])
def test_a_quarter_of_the_free_memory_is_enough(
    available: int, fits: bool, module: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    held = Packs()
    assert held.fit([(module,)]) is fits
    held.copies([(module,)])
    free.available = 0
    assert held.fit([(module,)])  # it is there already
    assert not held.fit([(module,), (nn.Linear(16, 24),)])


@pytest.mark.parametrize(
    ("limit", "fits"), [("max", True), (str(1000 + 4 * 1536), True), ("7000", False), (None, True)]
)
def test_a_container_has_a_limit_of_its_own(
    limit: str | None,
    fits: bool,
    module: nn.Linear,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packs, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1e9))
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000\n")
    assert Packs().fit([(module,)]) is fits

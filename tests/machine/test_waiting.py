"""What a capture would break off at is found before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from selfspec.machine.waiting import NothingWaits

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 1),
    "slice": lambda x: x[x[1] :],
    "nonzero": lambda x: (x > 1).nonzero(),
    "mask": lambda x: x[x > 1],
    "write by mask": lambda x: x.__setitem__(x > 1, 3),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x),
    "to a device": lambda x: x.to("meta"),
    "from a device": lambda x: torch.zeros(4, device="meta").copy_(x),
}
WAITS_FOR_NOTHING: dict[str, Callable[[torch.Tensor], object]] = {
    "indices": lambda x: x[x.flip(0)],
    "write by indices": lambda x: x.__setitem__(x.clone(), 3),
    "repeats of a known size": lambda x: x.repeat_interleave(x, output_size=6),
    "where": lambda x: torch.where(x > 1, x, 0),
    "another dtype": lambda x: x.float(),
    "another device alone": lambda _: torch.zeros(3, device="meta").sum(),
}


@pytest.mark.parametrize("work", WAITS.values(), ids=WAITS)
def test_what_waits_is_named(work: Callable[[torch.Tensor], object]) -> None:
    given = torch.arange(4)
    refused = pytest.raises(RuntimeError, match=r"makes the CPU wait|from one device")
    with refused, NothingWaits("cpu"):
        work(given)


@pytest.mark.parametrize("work", WAITS_FOR_NOTHING.values(), ids=WAITS_FOR_NOTHING)
def test_other_work_runs(work: Callable[[torch.Tensor], object]) -> None:
    given = torch.arange(4)
    with NothingWaits("cpu"):
        work(given)


def test_numbers_of_other_devices_may_be_read() -> None:
    with NothingWaits("cuda"):
        assert torch.arange(4)[3].item() == 3

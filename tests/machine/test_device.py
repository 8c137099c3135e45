"""The CPU's device does all at once; the recording one shows what a CUDA device may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from selfspec.machine.device import CudaDevice, device_for, seeded
from tests.recorder import NOT_PERMITTED, RecordingDevice


def test_a_cpu_does_all_at_once():
    device = device_for(torch.device("cpu"))
    assert device.capture(lambda: None) == "a CPU captures no graphs"
    tensor = torch.ones(3)
    fetched = device.fetch(tensor, tensor[:1])
    device.send(torch.tensor([2.0]), into=tensor[:1])
    assert [x.tolist() for x in fetched.get()] == [[2.0, 1.0, 1.0], [2.0]]


@pytest.mark.parametrize(("version", "captures"), [("2.11.1", False), ("2.12.0+cu130", True)])
def test_an_old_torch_captures_no_graphs(version: str, captures: bool, monkeypatch: Any):
    monkeypatch.setattr(torch, "__version__", version)
    assert CudaDevice(torch.device("cuda:0")).can_capture == captures


def test_a_seed_stays_on_its_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("other devices"))
    before = torch.get_rng_state()
    with seeded(5, [torch.device("cpu")]):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("read", [bool, torch.nonzero, torch.Tensor.cpu, torch.Tensor.tolist])
def test_the_recorder_lets_no_value_be_read_while_it_captures(read: Callable[[torch.Tensor], Any]):
    device = RecordingDevice([])
    reason = device.capture(lambda: read(torch.zeros((), dtype=torch.long)))
    assert NOT_PERMITTED in str(reason)

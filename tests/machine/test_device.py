"""The CPU's device does all at once; the recording one shows what a CUDA device may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from selfspec.machine.device import CudaDevice, device_for, own_seed
from tests.recorder import NOT_PERMITTED, RecordingDevice


def test_a_cpu_does_all_at_once():
    device = device_for(torch.device("cpu"))
    assert device.capture(lambda: None) == "a CPU captures no graphs"
    tensor = torch.ones(3)
    fetched = device.fetch(tensor, tensor[:1])
    device.send(torch.tensor([2.0]), into=tensor[:1])
    assert [x.tolist() for x in fetched.get()] == [[2.0, 1.0, 1.0], [2.0]]


class Stub:
    """Takes down every call on it, and gives itself for whatever is asked."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def __getattr__(self, name: str) -> Callable[..., Stub]:
        def call(*args: Any, **kwargs: Any) -> Stub:
            words = [x._name for x in (*args, *kwargs.values()) if isinstance(x, Stub)]
            self._log.append(" ".join([f"{self._name}.{name}", *words]))
            return Stub(self._log, name)

        return call

    def __enter__(self) -> None:
        self._log.append(f"into {self._name}")

    def __exit__(self, *_: object) -> None:
        self._log.append(f"out of {self._name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that a `CudaDevice` makes, in order."""
    log: list[str] = []
    monkeypatch.setattr("selfspec.machine.device._capture_stream", lambda _: Stub(log, "capturing"))
    stubs = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: Stub(log, "main"),
        "stream": lambda stream: Stub(log, stream._name),
        "graph": lambda *_, **kwargs: Stub(log, f"capture {kwargs['capture_error_mode']}"),
        "graph_pool_handle": lambda: log.append("new pool"),
        "CUDAGraph": lambda: Stub(log, "graph"),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return log


def test_a_capture_comes_after_a_run_on_a_stream_of_its_own(cuda: list[str]):
    device = CudaDevice(torch.device("cuda"))
    assert not isinstance(device.capture(lambda: cuda.append("work")), str)
    runs = ["into capturing", "work", "out of capturing", "main.wait_stream capturing"]
    assert cuda[1:5] == runs
    assert cuda[-2:] == ["graph.replay", "main.synchronize"]


@pytest.mark.parametrize("at", ["into capturing", "into capture thread_local"])
def test_no_memory_for_a_capture_is_a_reason(at: str, cuda: list[str]):
    device = CudaDevice(torch.device("cuda"))

    def work() -> None:
        if at in cuda:
            raise torch.OutOfMemoryError("on purpose\nand a long story")

    assert device.capture(work) == "capturing it fails (OutOfMemoryError: on purpose)"
    assert "main.wait_stream capturing" in cuda  # What was queued before may still write.
    if at != "into capturing":
        assert cuda[-1] == "out of main"


@pytest.mark.parametrize(("version", "captures"), [("2.11.1", False), ("2.12.0+cu130", True)])
def test_an_old_torch_captures_no_graphs(version: str, captures: bool, monkeypatch: Any):
    monkeypatch.setattr(torch, "__version__", version)
    assert CudaDevice(torch.device("cuda:0")).can_capture == captures


def test_a_seed_stays_on_its_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("other devices"))
    before = torch.get_rng_state()
    with own_seed(5, [torch.device("cpu")]):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("read", [bool, torch.nonzero, torch.Tensor.cpu, torch.Tensor.tolist])
def test_the_recorder_lets_no_value_be_read_while_it_captures(read: Callable[[torch.Tensor], Any]):
    device = RecordingDevice([])
    reason = device.capture(lambda: read(torch.zeros((), dtype=torch.long)))
    assert NOT_PERMITTED in str(reason)

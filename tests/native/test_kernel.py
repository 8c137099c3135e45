"""Code of our own is there, or it is not, and nothing else happens."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from selfspec.native import attention, kernel, projection


def missing(*_: object) -> None:
    raise AssertionError("asked for")


def test_without_llvmlite_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert kernel.compiled(missing) is None


@pytest.mark.skipif(kernel._pool() is None, reason="torch's threads are not to be had")
@pytest.mark.parametrize("fails", [ImportError, OSError, RuntimeError, AttributeError, TypeError])
def test_what_can_not_be_compiled_is_none(fails: type[Exception]) -> None:
    def write() -> None:
        raise fails("not here")

    assert kernel.compiled(write) is None


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_on_other_systems_there_is_none(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert kernel.compiled(missing) is None


def test_without_torchs_threads_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self, _name: str | None) -> None:
            """A library without what is looked for."""

    monkeypatch.setattr(ctypes, "CDLL", Other)
    assert kernel.compiled(missing) is None


def test_then_nobody_relies_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_kernel", lambda _dtype: None)
    monkeypatch.setattr(attention, "_kernel", lambda _dtype, _dim: None)
    assert not projection._comes_out.__wrapped__(torch.bfloat16)
    assert not attention._comes_out.__wrapped__(torch.bfloat16, 64, 2)
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    assert torch.equal(projection.project(x, weight, None), torch.nn.functional.linear(x, weight))

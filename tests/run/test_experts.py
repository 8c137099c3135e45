"""Experts are copied for few tokens only, and the outcome is the same."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.integrations import moe
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

from selfspec.run import experts
from selfspec.run.experts import decode_mode
from tests.fakes import new_model, prompt


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each way was taken."""
    taken: Counter[str] = Counter()
    for name in ("batched_mm", "grouped_mm"):
        forward = getattr(moe, f"{name}_experts_forward")

        def counted(*args: Any, _name: str = name, _forward: Any = forward) -> Any:
            taken[_name] += 1
            return _forward(*args)

        monkeypatch.setattr(moe, f"{name}_experts_forward", counted)
    return taken


def switching(model: Any) -> None:
    """Stock's switch, which it has on CUDA only."""

    @contextmanager
    def mode() -> Any:
        model.set_experts_implementation("batched_mm")
        yield
        model.set_experts_implementation("grouped_mm")

    model._optimize_model_for_decode = mode


@pytest.mark.parametrize("sorts", [True, False])
@pytest.mark.parametrize(("num_tokens", "way"), [(1, "batched_mm"), (9, "grouped_mm")])
def test_many_tokens_are_sorted_where_there_is_a_kernel(
    num_tokens: int, way: str, sorts: bool, ways: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_sorts_on_device", lambda _: sorts)
    monkeypatch.setattr(experts, "_FEW", 1)
    model, ids = new_model("qwen3-moe"), prompt(1, num_tokens)["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        switching(model)
        with decode_mode(model):
            found = model(ids).logits
    assert set(ways) == {way if sorts else "batched_mm"}
    assert torch.allclose(found, expected, atol=1e-5)
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}


def test_experts_in_fp8_keep_stocks_way() -> None:
    """They are told their way by its name, too, but by a table of their own."""
    model = new_model("qwen3-moe")
    switching(model)
    with decode_mode(model):
        (name,) = model.get_experts_implementation().values()
        ways = ALL_FP8_EXPERTS_FUNCTIONS
        assert name != "batched_mm"
        assert ways.get_interface(name, None) is ways["batched_mm"]


def test_a_model_of_one_way_keeps_it(ways: Counter[str]) -> None:
    model = new_model("qwen3-moe")
    model.set_experts_implementation("eager")
    with torch.no_grad(), decode_mode(model):
        model(prompt(1, 9)["input_ids"])
    assert not ways


def test_kernels_for_sorted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for major in (8, 9, 10, 12):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, m=major: (m, 0))
        for dtype in (torch.bfloat16, torch.float16):
            found[major, dtype] = experts._sorts_on_device(torch.empty(1, dtype=dtype))
    assert [kind for kind, sorts in found.items() if sorts] == [
        (9, torch.bfloat16),
        (10, torch.bfloat16),
    ]

"""What a verdict on a model depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from selfspec.ability.state import state_of
from tests.fakes import new_model, prompt


@pytest.fixture(params=["", "cuda.matmul", "cudnn", "mkldnn", "mkldnn.matmul"])
def backend(request: pytest.FixtureRequest) -> Any:
    """A backend of torch that has a precision for float32."""
    settings = torch.backends
    for name in filter(None, request.param.split(".")):
        settings = getattr(settings, name)
    before = getattr(settings, "fp32_precision", None)
    if before is None:
        pytest.skip("these settings are new in torch 2.9")
    yield settings
    settings.fp32_precision = before


def test_each_backend_has_a_precision_for_float32(backend: Any) -> None:
    """Torch's setting for all of them raises an error where they differ."""
    model = selfspec.attach(new_model("llama"))
    backend.fp32_precision = "ieee"
    before = state_of(model)
    backend.fp32_precision = "tf32"
    assert state_of(model) != before
    spec = selfspec.SelfSpec()
    ids: Any = model.generate(**prompt(), assistant=spec, max_new_tokens=4)
    assert ids.tolist() == model.generate(**prompt(), max_new_tokens=4).tolist()
    assert spec.stats.disabled_reason is None

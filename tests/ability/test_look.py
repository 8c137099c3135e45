"""What a verdict on a model depends on."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import selfspec
from selfspec import SelfSpec
from selfspec.ability import look
from selfspec.ability.look import look_at
from tests.fakes import new_model, prompt
from tests.sessions import TextSession


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
    before = look_at(model).verdict_key
    backend.fp32_precision = "tf32"
    assert look_at(model).verdict_key != before
    spec = SelfSpec()
    ids: Any = model.generate(**prompt(), assistant=spec, max_new_tokens=4)
    assert ids.tolist() == model.generate(**prompt(), max_new_tokens=4).tolist()
    assert spec.stats.disabled_reason is None


_WALKS = ("modules", "named_modules", "children", "parameters", "named_parameters", "buffers")


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what walks over the modules of a model for selfspec, by its name.

    A function that counts is one of ours in a class of torch, so hooks are to be trusted.
    """
    counts = Counter[str]()

    def count(owner: Any, name: str) -> None:
        walk = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("selfspec."):
                counts[name] += 1
            return walk(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in _WALKS:
        count(nn.Module, name)
    count(look, "modules_of")
    return counts


@pytest.mark.parametrize("kept_kv", [None, "1MB"])
@pytest.mark.parametrize("name", ["llama", "lfm2", "bloom"])
def test_a_warm_call_walks_over_the_modules_once(
    name: str, kept_kv: Any, walks: Counter[str]
) -> None:
    model, spec = selfspec.attach(new_model(name)), SelfSpec(kept_kv=kept_kv, trust_hooks=True)
    for _ in range(2):
        walks.clear()
        model.generate(**prompt(), assistant=spec, max_new_tokens=8)  # type: ignore[operator]
    assert spec.stats.mode == ("chain" if name == "bloom" else "tree")
    assert walks == {"modules_of": 1}


def test_a_session_looks_when_a_prompt_is_added_and_in_no_step(walks: Counter[str]) -> None:
    model = selfspec.attach(new_model("llama"))
    session = TextSession(model, None, SelfSpec(trust_hooks=True))
    session.submit(0, [5, 6, 7], 0, {"max_new_tokens": 8})
    walks.clear()
    session.submit(1, [5, 6, 7], 0, {"max_new_tokens": 8})
    assert walks == {"modules_of": 1}
    session.step()  # Opens the engine, which may be long after the first prompt came.
    walks.clear()
    assert len(session.answers()) == 2
    assert not walks

"""Who wrote the code in a model, as far as functions and classes tell."""

from __future__ import annotations

import importlib.util
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.nn.utils import prune
from transformers.models.lfm2 import modeling_lfm2

from selfspec.compat import authors
from selfspec.compat.modules import hooks_on
from selfspec.forward.states.swapped_functions import _Branching
from tests.fakes import new_model, of_library, tiny_model


def hook(*_: Any) -> None:
    """A user's hook."""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch's that it has better ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def wrapped_like_a_layer() -> Any:
    @wraps(nn.Linear.forward)
    def forward(*args: Any) -> Any:
        return nn.Linear.forward(*args)

    return forward


class Hooks:
    def method(self, *_: Any) -> None:
        """A hook too."""

    __call__ = method


with quiet():
    TRACED = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))

USERS = {
    "function": hook,
    "lambda": lambda *_: None,
    "method": Hooks().method,
    "object": Hooks(),
    "class": Hooks,
    "partial": partial(hook, 1),
    "in a partial of torch": partial(nn.functional.relu, hook),
    "in a wrapper of torch": torch.no_grad()(hook),
    "looks like a layer": wrapped_like_a_layer(),
    "in an autograd function": Doubled.apply,
    "traced": TRACED,
    "class of what was traced": type(TRACED),
    "drawn as a graph": torch.fx.symbolic_trace(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("code", USERS.values(), ids=USERS)
def test_code_of_a_user_is_known_through_what_wraps_it(code: Any) -> None:
    assert not authors.is_of_library(code)
    assert not authors.is_harmless(code)


def test_operators_and_scripts_are_of_libraries() -> None:
    with quiet():
        scripted = torch.jit.script(nn.functional.silu)
    for code in (scripted, torch.ops.aten.add, torch.ops.aten.add.Tensor, nn.Linear(1, 1).to):
        assert authors.is_of_library(code)


def test_closures_of_one_function_are_the_same() -> None:
    ones = [lambda *_, n=n: n for n in range(2)]
    assert authors.functions_of(ones[0]) == authors.functions_of(ones[1])
    assert authors.functions_of(ones[0]) != authors.functions_of(hook)
    assert authors.functions_of(Hooks()) == authors.functions_of(Hooks())
    assert authors.name_of(partial(hook, 1)) == authors.name_of(torch.no_grad()(hook)) == "hook"


def added(model: Any, add: Any) -> list[Any]:
    add(model)
    return [each for module in model.modules() for each in hooks_on(module).values()]


def test_hooks_that_change_no_token_are_harmless() -> None:
    for add in (
        lambda model: model.enable_input_require_grads(),
        lambda model: prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5),
    ):
        hooks = added(new_model(), add)
        assert hooks
        assert all(map(authors.is_harmless, hooks))
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, AlignDevicesHook())
    assert authors.is_of_library(layer.forward)
    assert authors.is_of_library(layer._hf_hook)


def test_functions_that_a_user_has_put_into_modules_of_libraries(monkeypatch: Any) -> None:
    classes = {type(module) for module in tiny_model("lfm2").modules()}
    assert authors.replaced_functions(classes) == []
    assert authors.replaced_functions({Hooks}) == []
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", of_library(hook, "liger_kernel"))
    assert authors.replaced_functions(classes) == []
    place = "transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn"
    # Alone, after ours, and in a mock, which has every attribute.
    branching, mock = _Branching("causal_conv1d_fn", hook), MagicMock(side_effect=hook)
    for function in (hook, branching, mock, Doubled.apply, cached_property(hook)):
        monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", function)
        assert authors.replaced_functions(classes) == [(place, function)]
    monkeypatch.undo()
    assert authors.replaced_functions(classes) == []


def test_a_function_that_is_taken_back_is_freed(monkeypatch: Any) -> None:
    classes = {type(module) for module in tiny_model("lfm2").modules()}

    def theirs(*_: Any) -> None:
        """A closure, which may hold much memory."""

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", theirs)
    assert authors.replaced_functions(classes)
    reference = weakref.ref(theirs)
    del theirs
    monkeypatch.undo()
    assert reference() is None


def test_what_torch_has_compiled_replaces_nothing() -> None:
    model = tiny_model("lfm2")
    norm = model.model.layers[0].ffn_norm
    torch.compile(norm.forward, backend="eager")(torch.ones(1, norm.weight.numel()))
    assert any(name.startswith("__compiled_fn_") for name in vars(modeling_lfm2))
    assert authors.replaced_functions({type(module) for module in model.modules()}) == []


def test_a_part_that_torch_wraps_replaces_nothing() -> None:
    wrapped = torch.compile(nn.Linear(2, 2), backend="eager")
    assert authors.replaced_functions({type(wrapped)}) == []


def test_kernels_of_the_hub_are_of_a_library(monkeypatch: Any, tmp_path: Path) -> None:
    """As `kernels` loads them: from the Hub's cache, with a number behind the name."""
    file = tmp_path / "models--owner--rotary" / "build" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("def forward(self, x):\n    return x\n")
    for name, is_of_library in (("rotary_1a2b", True), ("rotary_of_a_user", False)):
        folder = tmp_path if is_of_library else tmp_path / "other"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        assert authors.is_of_library(MethodType(module.forward, nn.ReLU())) is is_of_library

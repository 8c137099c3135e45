"""Other people's code in a model: never tried without their word, and what their word is worth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from selfspec import SelfSpec, per_token
from selfspec import runner as run_module
from tests.fakes import new_model, prompt
from tests.lossless.same import FIXED, GREEDY, doubting, run, run_both, slow

STRENGTH = torch.linspace(-1, 1, 32)


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


class Switch:
    """A hook that acts on the newest token, by a flag, a strength, a count or a width."""

    def __init__(self, when: Callable[[Switch, int], bool]) -> None:
        self.when, self.is_on, self.strength, self.num_calls = when, False, 0.0, 0

    def __call__(self, _module: Any, _args: Any, output: Any) -> None:
        self.num_calls += 1
        hidden = first(output)
        if self.when(self, hidden.shape[1]):
            hidden[:, -1] += STRENGTH


HOOKS: dict[str, Callable[[Switch, int], bool]] = {
    "by a flag": lambda hook, _width: hook.is_on,
    "by a strength": lambda hook, _width: hook.strength > 0,
    "on wide forwards": lambda _hook, width: width > 12,
    "the first time": lambda hook, _width: hook.num_calls == 1,
    "each third time": lambda hook, _width: hook.num_calls % 3 == 0,
    "after 25 times": lambda hook, _width: hook.num_calls > 25,
}


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A mark for each model that is tried."""
    tried: list[str] = []
    probe = run_module.probe

    def counted(model: Any, width: int) -> Any:
        tried.append(type(model).__name__)
        return probe(model, width)

    monkeypatch.setattr(run_module, "probe", counted)
    return tried


@pytest.mark.parametrize("name", ["llama", slow("gpt2"), "lfm2"])
@pytest.mark.parametrize("when", HOOKS.values(), ids=HOOKS)
def test_a_hook_is_heard_as_often_as_by_stock(
    when: Callable[[Switch, int], bool], name: str, trials: list[str]
) -> None:
    model = new_model(name)
    layer = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
    outcomes = []
    for extra in ({}, {"custom_generate": SelfSpec(max_nodes=64, budget="fixed")}):
        hook = Switch(when)
        handle = layer.register_forward_hook(hook)
        ids = [run(model, prompt(), **extra, **GREEDY).ids.tolist()]
        hook.is_on, hook.strength = True, 1.0
        ids.append(run(model, prompt(), **extra, **GREEDY).ids.tolist())
        outcomes.append((ids, hook.num_calls))
        handle.remove()
    assert outcomes[0] == outcomes[1]
    assert not trials
    reason = extra["custom_generate"].stats.disabled_reason
    assert "has the hook 'Switch'" in reason
    assert "trust_hooks=True" in reason


class Wrapper(nn.Module):
    """A module of a user's around a layer, with a switch that is no flag."""

    def __init__(self, inner: nn.Module, switch: Any) -> None:
        super().__init__()
        self.inner, self.switch = inner, switch

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(hidden, *args, **kwargs)
        if self.switch > 0:
            first(output)[:, -1] += STRENGTH
        return output


@pytest.mark.parametrize("switches", [(0, 1), (torch.tensor(0), torch.tensor(1))])
def test_a_wrapper_module_with_a_switch(switches: tuple[Any, Any], trials: list[str]) -> None:
    model, spec = new_model(), SelfSpec(**FIXED)
    wrapper = model.model.layers[1] = Wrapper(model.model.layers[1], switches[0])
    for switch in switches:
        wrapper.switch = switch
        run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert "'model.layers.1' is a " in spec.stats.disabled_reason
    assert f"{__name__}.Wrapper, which is not tried" in spec.stats.disabled_reason
    assert not trials


def test_a_forward_of_a_users_that_looks_like_the_models(trials: list[str]) -> None:
    """`functools.wraps` gives it the name and the module of the one inside."""
    from functools import wraps

    model, spec = new_model(), SelfSpec(**FIXED)
    inner = model.model.layers[1].forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    model.model.layers[1].forward = forward
    run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert "'model.layers.1' has the forward" in spec.stats.disabled_reason
    assert not trials


# their author's word


def test_a_trusted_hook_is_tried_as_wide_as_the_widest_tree() -> None:
    for max_nodes, is_found in ((64, True), (12, False)):
        model = new_model()
        model.model.layers[0].register_forward_hook(Switch(HOOKS["on wide forwards"]))
        ability = SelfSpec(max_nodes=max_nodes, trust_hooks=True).ability(model)
        assert ("several tokens in one forward" in str(ability.reason)) == is_found


def test_a_function_that_is_registered_for_each_call_is_tried_once(trials: list[str]) -> None:
    model, spec = new_model(), SelfSpec(**FIXED)
    for number in range(5):
        heard: list[int] = []
        hook = per_token(lambda *_, heard=heard: heard.append(1))
        handle = model.model.layers[0].register_forward_hook(hook)
        ids = run(model, prompt(), custom_generate=spec, **GREEDY).ids
        assert spec.stats.disabled_reason is None
        assert number == 0 or len(heard) <= spec.stats.num_steps + 1
        handle.remove()
        assert torch.equal(ids, run(model, prompt(), **GREEDY).ids)
    assert len(trials) == 1


def test_gradient_checkpointing_for_each_step_makes_no_new_trial(trials: list[str]) -> None:
    """As trl's GRPO generates between two steps of training."""
    model, spec = new_model(), SelfSpec(**FIXED)
    for _ in range(3):
        model.enable_input_require_grads()
        run_both(model.eval(), prompt(2), spec, drafts=False, **GREEDY)
        assert spec.stats.disabled_reason is None
        model.disable_input_require_grads()
        model.train()
    assert len(trials) == 1


# models of somebody's own


class Own(LlamaForCausalLM):
    """A model whose code has a switch, or acts by the width of a forward."""

    switch: Any = 0
    widest = 1000

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        if self.switch > 0 or output.logits.shape[1] > self.widest:
            output.logits[:, -1] = output.logits[:, -1].roll(1, -1)
        return output


def own_model(switch: Any = 0) -> Any:
    model = new_model()
    model.__class__ = Own
    model.switch = switch
    return model


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_the_switches_of_an_own_model_count(kind: Any, trials: list[str]) -> None:
    model, spec = own_model(kind(0)), SelfSpec(**FIXED)
    assert spec.ability(model).mode == "tree"
    for value in (1, 0, 1):
        model.switch = kind(value)
        run_both(model, prompt(), spec, drafts=False, **GREEDY)
        assert (spec.stats.disabled_reason is None) == (value == 0)
    assert len(trials) == 2


def test_an_own_model_that_always_changes_is_tried_three_times(trials: list[str]) -> None:
    model, spec = own_model(), SelfSpec(**FIXED)
    for number in range(6):
        model.num_texts = number
        run_both(model, prompt(), spec, drafts=False, **GREEDY)
        assert ("after each of 3 trials" in str(spec.stats.disabled_reason)) == (number >= 3)
    assert len(trials) == 3


def test_an_own_model_is_tried_as_wide_as_the_widest_tree() -> None:
    model = own_model()
    model.widest = 12
    assert SelfSpec(max_nodes=12).ability(model).mode == "tree"
    ability = SelfSpec(max_nodes=64).ability(model)
    assert ability.mode == "plain"
    run_both(model, prompt(), partial(doubting, max_nodes=64), drafts=False, **GREEDY)


# layers in which a token's result depends on other tokens


def of_library(name: str) -> Callable[[type], type]:
    """Makes a class look as if a library had written it."""

    def rename(kind: type) -> type:
        code = vars(kind)["forward"].__code__
        kind.__module__ = name
        kind.forward = FunctionType(code, {**globals(), "__name__": name})  # type: ignore
        return kind

    return rename


@of_library("bitsandbytes.nn.modules")
class Linear8bitLt(nn.Linear):
    """As LLM.int8 of bitsandbytes: columns that are large in any token are not rounded."""

    threshold = 6.0

    @property
    def state(self) -> Any:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        is_large = (rows.abs() >= self.threshold).any(0) & (self.threshold > 0)
        scale = rows.masked_fill(is_large, 0).abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        rounded = torch.where(is_large, rows, (rows / scale).round() * scale)
        return nn.functional.linear(rounded, self.weight, self.bias).reshape(*x.shape[:-1], -1)


def with_linears(kind: type, **changes: Any) -> Any:
    model = new_model(**changes)
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = kind
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_of_all_tokens_are_decoded_plainly(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_linears(Linear8bitLt, dtype=dtype)
    both = run_both(model, prompt(2), SelfSpec(**FIXED), drafts=False, **GREEDY)
    assert "Linear8bitLt of bitsandbytes" in str(both.stats.disabled_reason)
    monkeypatch.setattr(Linear8bitLt, "threshold", 0.0)
    assert SelfSpec().ability(model).mode == "tree"


@pytest.mark.filterwarnings("ignore:(torch.quantize_per_tensor|torch.ao.quantization):")
def test_one_scale_for_all_tokens_is_found_out() -> None:
    model = torch.ao.quantization.quantize_dynamic(new_model(), {nn.Linear}, torch.qint8)
    both = run_both(model, prompt(), SelfSpec(**FIXED), drafts=False, **GREEDY)
    assert "tokens that come later" in str(both.stats.disabled_reason)


@of_library("torchao.quantization")
class OneScale(nn.Linear):
    """Rounds its input to 8 bits, with one scale for all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_for_all_tokens_of_a_layer_is_found_out(dtype: torch.dtype) -> None:
    model = with_linears(OneScale, dtype=dtype)
    assert "must not see" in str(SelfSpec().ability(model).reason)

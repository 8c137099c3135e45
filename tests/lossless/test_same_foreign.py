"""Other people's code in a model: never run in a trial without their word, and named."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from selfspec import SelfSpec
from selfspec import runner as run_module
from tests.fakes import new_model, of_library, prompt
from tests.lossless.same import FIXED, GREEDY, NUM_COLUMNS, run, run_both, slow


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


class EveryThird:
    """A hook that acts on the newest token of every third forward."""

    num_calls = 0

    def __call__(self, _module: Any, _args: Any, output: Any) -> None:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            first(output)[:, -1] *= -1


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A mark for each model that is tried."""
    tried: list[str] = []
    probe = run_module.probe

    def counted(model: Any) -> Any:
        tried.append(type(model).__name__)
        return probe(model)

    monkeypatch.setattr(run_module, "probe", counted)
    return tried


@pytest.mark.parametrize("name", ["llama", slow("gpt2"), "lfm2"])
def test_a_hook_is_heard_as_often_as_by_stock(name: str, trials: list[str]) -> None:
    model = new_model(name)
    layer = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
    outcomes = []
    for extra in ({}, {"custom_generate": SelfSpec(max_nodes=64, budget="fixed")}):
        hook = EveryThird()
        handle = layer.register_forward_hook(hook)
        ids = run(model, prompt(), **extra, **GREEDY).ids.tolist()
        outcomes.append((ids, hook.num_calls))
        handle.remove()
    assert outcomes[0] == outcomes[1]
    assert not trials
    reason = extra["custom_generate"].stats.disabled_reason
    assert "has the hook 'EveryThird'" in reason
    assert "trust_hooks=True" in reason


class Wrapper(nn.Module):
    """A module of a user's around a layer, which acts by the width of a forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(hidden, *args, **kwargs)
        if hidden.shape[1] > 1:
            first(output)[:, -1] *= -1
        return output


class Hook(AlignDevicesHook):
    """A user's, which is handed to accelerate."""


class Subclass(LlamaForCausalLM):
    """Adds nothing."""


Subclass.__module__ = "__main__"
Undo = Callable[[], object]


def hooked(model: Any) -> Undo:
    return model.model.layers[0].register_forward_hook(lambda *_: None).remove  # type: ignore


def hooked_with_all_modules(_model: Any) -> Undo:
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    return handle.remove  # type: ignore[no-any-return]


def wrapped(model: Any) -> Undo:
    """`functools.wraps` gives it the name and the module of the one inside."""
    layer = model.model.layers[1]
    inner = layer.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    layer.forward = forward
    return lambda: delattr(layer, "forward")


def wrapped_in_a_module(model: Any) -> Undo:
    layer, layers = model.model.layers[1], model.model.layers
    layers[1] = Wrapper(layer)
    return lambda: layers.__setitem__(1, layer)


def replaced_in_the_class(_model: Any) -> Undo:
    inner = LlamaMLP.forward
    LlamaMLP.forward = lambda self, x: inner(self, x)
    return lambda: setattr(LlamaMLP, "forward", inner)


def replaced_in_the_module(_model: Any) -> Undo:
    """It scales the queries of forwards over some numbers of tokens, which stock never reads."""
    inner = modeling_llama.apply_rotary_pos_emb

    def rotate(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = 2.0 if 8 < query.shape[2] < NUM_COLUMNS else 1.0
        return inner(scale * query, *args, **kwargs)

    modeling_llama.apply_rotary_pos_emb = rotate
    return lambda: setattr(modeling_llama, "apply_rotary_pos_emb", inner)


def replaced_in_the_cache(_model: Any) -> Undo:
    inner = DynamicLayer.update
    DynamicLayer.update = lambda *args, **kwargs: inner(*args, **kwargs)
    return lambda: setattr(DynamicLayer, "update", inner)


def replaced_in_torch(_model: Any) -> Undo:
    inner = nn.functional.silu
    nn.functional.silu = lambda *args, **kwargs: inner(*args, **kwargs)
    return lambda: setattr(nn.functional, "silu", inner)


class Steered(nn.Parameter):
    """A weight whose class answers functions of torch, by how many tokens they get."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outcome = super().__torch_function__(func, types, args, kwargs or {})
        is_blind = func is nn.functional.linear and 8 < args[0].shape[1] < NUM_COLUMNS
        return outcome * 0 if is_blind else outcome


def held_in_a_class(model: Any) -> Undo:
    layer = model.model.layers[1].mlp.up_proj
    inner, layer.weight = layer.weight, Steered(layer.weight.detach(), requires_grad=False)
    return lambda: setattr(layer, "weight", inner)


def hooked_by_accelerate(model: Any) -> Undo:
    add_hook_to_module(model.lm_head, Hook())
    return lambda: remove_hook_from_module(model.lm_head)


def of_a_subclass(model: Any) -> Undo:
    before, model.__class__ = model.__class__, Subclass
    return lambda: setattr(model, "__class__", before)


def replaced_for_steps(model: Any) -> Undo:
    """It gives plain steps another token, as code that steers may do."""
    inner = model.prepare_inputs_for_generation

    @wraps(inner)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        inputs = inner(*args, **kwargs)
        if inputs["input_ids"].shape[1] == 1:
            inputs["input_ids"] = inputs["input_ids"] // 2 + 3
        return inputs

    model.prepare_inputs_for_generation = prepare
    return lambda: delattr(model, "prepare_inputs_for_generation")


def attention_of_ones_own(_model: Any) -> Undo:
    def attend(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", attend)
    return lambda: AttentionInterface.register("sdpa", sdpa_attention_forward)


FOREIGN: dict[str, tuple[Callable[[Any], Undo], str]] = {
    "hook": (hooked, "its module 'model.layers.0' has the hook '<lambda>'"),
    "hook of all": (hooked_with_all_modules, "all modules have the hook '<lambda>'"),
    "forward": (wrapped, "its module 'model.layers.1' has the forward"),
    "module": (wrapped_in_a_module, f"is a {__name__}.Wrapper, which is not tried"),
    "forward of a class": (replaced_in_the_class, "LlamaMLP.forward is '<lambda>' now"),
    "function": (replaced_in_the_module, "modeling_llama.apply_rotary_pos_emb is 'rotate' now"),
    "function of torch": (replaced_in_torch, "torch.nn.functional.silu is '<lambda>' now"),
    "weight": (held_in_a_class, f"one of its weights is a {__name__}.Steered"),
    "method of a cache": (replaced_in_the_cache, "DynamicLayer.update is '<lambda>' now"),
    "accelerate": (hooked_by_accelerate, "'lm_head' has the accelerate hook 'Hook'"),
    "subclass": (of_a_subclass, "it is a __main__.Subclass"),
    "method": (replaced_for_steps, "it has the method 'prepare_inputs_for_generation'"),
    "attention": (attention_of_ones_own, "it has the attention, 'attend'"),
}


@pytest.mark.parametrize(("put", "said"), FOREIGN.values(), ids=FOREIGN)
def test_code_that_comes_and_goes(put: Callable[[Any], Undo], said: str, trials: list[str]) -> None:
    """Drafts go on after it with the verdict of before; while it is there, it is named."""
    model, spec, shortly = new_model(), SelfSpec(**FIXED), {"max_new_tokens": 6, **GREEDY}
    run_both(model, prompt(), spec, drafts=False, **shortly)
    assert spec.stats.disabled_reason is None
    undo = put(model)
    try:
        run_both(model, prompt(), spec, drafts=False, **shortly)
        assert f"{said}" in str(spec.stats.disabled_reason)
        assert "use SelfSpec(trust_hooks=True)" in str(spec.stats.disabled_reason)
        assert spec.stats.forward == "eager"
        assert len(trials) == 1
        assert SelfSpec(trust_hooks=True).support(model).mode == "tree"
    finally:
        undo()
    run_both(model, prompt(), spec, drafts=False, **shortly)
    assert spec.stats.disabled_reason is None
    assert len(trials) == 2


def test_what_libraries_put_into_a_model_needs_no_word(trials: list[str]) -> None:
    model, spec = new_model(), SelfSpec(**FIXED)
    parametrizations.weight_norm(model.lm_head)
    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook())
    model.model.layers[1].register_forward_hook(of_library(lambda *_: None))
    run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert spec.stats.disabled_reason is None
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


# their user's word


TRUSTING = {**FIXED, "trust_hooks": True}


def test_trusted_code_is_believed(trials: list[str]) -> None:
    """A function that is registered for each call is tried once, and heard in each forward."""
    model, spec = new_model(), SelfSpec(**TRUSTING)
    for number in range(4):
        heard: list[int] = []

        def hook(_module: Any, _args: Any, output: Any, heard: list[int] = heard) -> Any:
            heard.append(1)
            first(output).mul_(-1)

        handle = model.model.layers[0].register_forward_hook(hook)
        ids = run(model, prompt(), custom_generate=spec, **GREEDY).ids
        assert spec.stats.disabled_reason is None
        assert number == 0 or len(heard) <= spec.stats.num_steps + 1
        assert torch.equal(ids, run(model, prompt(), **GREEDY).ids)
        handle.remove()
    assert len(trials) == 1


class Modal(LlamaForCausalLM):
    """Has a mode in which it makes a causal mask of its own, whatever it is given."""

    ignores_masks = False

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kw: Any
    ) -> Any:
        mask = None if self.ignores_masks else attention_mask
        return super().forward(input_ids, mask, position_ids, **kw)


def test_a_verdict_on_trusted_code_is_of_one_mode(trials: list[str]) -> None:
    model, spec = new_model(), SelfSpec(**TRUSTING)
    model.__class__ = Modal
    for ignores, mode in ((False, "tree"), (True, "chain"), (False, "tree")):
        model.ignores_masks = ignores
        assert spec.support(model).mode == mode
        run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert len(trials) == 2


# layers in which a token's result depends on other tokens


class Linear8bitLt(nn.Linear):
    """Named as LLM.int8 of bitsandbytes, in which a large value of one token rounds all others."""

    threshold = 6.0
    state = property(of_library(lambda layer: layer, "bitsandbytes"))


Linear8bitLt.__module__ = "bitsandbytes.nn.modules"


def test_outliers_of_all_tokens_are_decoded_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    model.model.layers[0].mlp.up_proj.__class__ = Linear8bitLt
    both = run_both(model, prompt(2), SelfSpec(**FIXED), drafts=False, **GREEDY)
    assert "Linear8bitLt of bitsandbytes" in str(both.stats.disabled_reason)
    monkeypatch.setattr(Linear8bitLt, "threshold", 0.0)
    assert SelfSpec().support(model).mode == "tree"


@pytest.mark.filterwarnings("ignore:(torch.quantize_per_tensor|torch.ao.quantization):")
def test_one_scale_for_all_tokens_is_found_out() -> None:
    model = torch.ao.quantization.quantize_dynamic(new_model(), {nn.Linear}, torch.qint8)
    both = run_both(model, prompt(), SelfSpec(**FIXED), drafts=False, **GREEDY)
    assert "those that come after them" in str(both.stats.disabled_reason)

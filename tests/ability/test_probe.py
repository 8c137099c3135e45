"""A model is given what it was seen to follow, and never a tree on trust."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from selfspec.ability import chain_trials
from selfspec.ability import probe as probe_module
from selfspec.ability.look import look_at
from selfspec.ability.probe import attention_types, probe
from selfspec.ability.trial_layers import TrialLayers
from selfspec.ability.user_code import foreign_code
from selfspec.compat.generation import KV
from selfspec.compat.modules import modules_of
from selfspec.compat.states import state_functions
from selfspec.forward.layout import Window
from selfspec.forward.tree_kv import TreeKV
from tests.fakes import new_model, tiny_model
from tests.lossless.same import slow

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def types_of(model_type: str, **changes: Any) -> Any:
    return attention_types(AutoConfig.for_model(model_type, **changes))


FULL, NEAR, BLOCKS = (f"{kind}_attention" for kind in ("full", "sliding", "chunked"))
SCALED = {"attention_chunk_size": 8, "attn_temperature_tuning": True, "floor_scale": 16}


@pytest.mark.parametrize(
    ("name", "config", "by_layer", "windows"),
    [
        ("llama", {}, [FULL, FULL], {FULL: Window()}),
        ("mistral", {"sliding_window": 7}, [NEAR, NEAR], {NEAR: Window("sliding", 7)}),
        ("mistral", {"sliding_window": None}, [FULL, FULL], {FULL: Window()}),
        (
            "gemma3_text",
            {"layer_types": [NEAR, FULL], "sliding_window": 6},
            [NEAR, FULL],
            {NEAR: Window("sliding", 6), FULL: Window()},
        ),
        ("llama4_text", SCALED, [BLOCKS, BLOCKS], {BLOCKS: Window("chunked", 8)}),
    ],
)
def test_attention_types_are_read_from_a_config(name, config, by_layer, windows):
    types = types_of(name, num_hidden_layers=2, **config)
    assert (list(types.by_layer), types.windows) == (by_layer, windows)
    assert types.scale_period == config.get("floor_scale", 0)


def test_a_multimodal_config_is_read_where_its_text_is():
    types = types_of("gemma3", text_config={"num_hidden_layers": 2, "sliding_window": 5})
    assert types.windows[NEAR] == Window("sliding", 5)


def test_a_window_of_the_models_own_making_is_refused():
    assert "its config sets 'window_size'" in attention_types(GPTNeoConfig())


def test_layers_with_states_are_told_from_those_without():
    types = types_of("qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", FULL])
    assert (types.by_layer, types.windows) == ((None, FULL), {FULL: Window()})
    assert types.states == {0}
    types = types_of("falcon_h1", num_hidden_layers=2)
    assert (types.by_layer, types.states) == ((FULL, FULL), {0, 1})


def test_compiled_layers_with_states_are_decoded_plainly() -> None:
    model = new_model("lfm2")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    support = probe(model)
    assert support.mode == "plain"
    assert "torch.compile runs layers that keep running states" in support.reason
    assert not look_at(model).foreign


@pytest.mark.parametrize("path", ["lm_head", "model.embed_tokens", "model.layers.0.feed_forward"])
def test_states_may_be_kept_beside_parts_that_are_compiled(path: str) -> None:
    model = new_model("lfm2")
    model.get_submodule(path).compile(backend="eager")
    assert probe(model).mode == "tree"


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_what_is_compiled_after_a_first_call_changes_the_verdict(name: str) -> None:
    """All but the whole model, which runs as it is."""
    model = new_model(name)
    before = look_at(model).verdict_key
    model.compile(backend="eager")
    assert look_at(model).verdict_key == before
    model.model.layers[0].compile(backend="eager")
    assert look_at(model).verdict_key != before


def test_layers_run_by_other_kernels_are_decoded_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel stands for a whole layer, so that it calls no function that we know."""

    def some(modules: Any) -> Any:
        return tuple(each for each in state_functions(modules) if "delta_rule" not in each[1])

    monkeypatch.setattr(probe_module, "state_functions", some)
    monkeypatch.setattr(chain_trials, "state_functions", some)
    support = probe(tiny_model("qwen3-5"))
    assert support.mode == "plain"
    assert "by code of its own" in support.reason


def test_layers_that_share_the_keys_of_others_get_chains() -> None:
    """They have a layer of the cache that keeps nothing, as layers without attention have."""
    layers = {"layer_types": [NEAR, FULL] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    sizes = {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8}
    more = {"sliding_window": 8, "vocab_size_per_layer_input": SMALL["vocab_size"]}
    config = AutoConfig.for_model("gemma4_text", **{**SMALL, **sizes, **layers, **more})
    support = probe(AutoModelForCausalLM.from_config(config).eval())
    assert support.mode == "chain"
    assert "KV layer" in support.reason


def test_unknown_layers_are_refused_by_their_type():
    kind = "compressed_sparse_attention"
    reason = types_of("llama", num_hidden_layers=1, layer_types=[kind])
    assert reason == f"it has layers of type {kind!r}, which can't branch"


def in_training(attention: str) -> PreTrainedModel:
    return new_model("llama", attention, attention_dropout=0.5).train()


# In 5.17 the cache of Mamba has no crop() of its own, which is found first.
_MAMBA = "moves its running states on by code of its own|can't be cropped"


@pytest.mark.parametrize(
    ("new", "mode", "said"),
    [
        (lambda: tiny_model("bloom"), "chain", "BloomForCausalLM"),
        (lambda: tiny_model("mamba"), "plain", _MAMBA),
        (lambda: new_model("llama", vocab_size=8), "plain", "vocabulary is too small"),
        (lambda: in_training("sdpa"), "plain", "draws random numbers"),
        (lambda: in_training("eager"), "plain", "draws random numbers"),
    ],
    ids=["alibi", "recurrent", "few tokens", "dropout", "dropout, eager"],
)
def test_what_can_not_branch_is_given_less_and_says_why(new, mode, said):
    support = probe(new())
    assert (support.mode, support.attention) == (mode, None)
    assert re.search(said, support.reason)


def test_an_attention_that_takes_no_4d_mask_is_given_no_tree():
    model = new_model("llama")
    model.config._attn_implementation = "flex_attention"
    assert "'flex_attention' attention takes no 4-D mask" in probe(model).reason


class Broken(LlamaForCausalLM):
    """A model whose subclasses change what its forward is given."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        self.begin(kwargs)
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = self.read(attention_mask)
        return super().forward(input_ids, attention_mask, self.count(position_ids), **kwargs)

    def begin(self, kwargs: dict[str, Any]) -> None:
        pass

    def read(self, mask: torch.Tensor) -> torch.Tensor | None:
        return mask

    def count(self, positions: torch.Tensor) -> torch.Tensor | None:
        return positions


class IgnoresMasks(Broken):
    """Makes its own causal mask whatever it is given: every node would see its elders."""

    def read(self, mask):
        return None


class IgnoresPositions(Broken):
    """Counts columns by itself: siblings would stand one behind the other."""

    def count(self, positions):
        return None


class IgnoresHalfTheMask(Broken):
    """Keeps what a mask says of the past, and sees the whole tree."""

    def read(self, mask):
        width = mask.shape[2]
        past = mask[..., :-width]
        causal = torch.full((width, width), torch.finfo(self.dtype).min).triu(1)
        return torch.cat([past, causal.expand(*past.shape[:2], -1, -1)], dim=-1)


class FailsOnMasks(Broken):
    """Takes masks of two dimensions only."""

    def read(self, mask):
        raise ValueError("expected a mask (B, L)")


def broken(
    kind: type[PreTrainedModel], attention: str = "sdpa", seed: int = 5, **changes: Any
) -> PreTrainedModel:
    config = LlamaConfig(**(SMALL | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (IgnoresMasks, "tokens of the forward that masks hide"),
        (IgnoresPositions, "those of a model that sees other guesses"),
        (IgnoresHalfTheMask, "tokens of the forward that masks hide"),
        (FailsOnMasks, "fails (ValueError: expected a mask (B, L))"),
    ],
)
def test_a_model_that_does_not_follow_a_tree_is_never_given_one(kind, said, attention):
    assert probe(broken(LlamaForCausalLM, attention)).mode == "tree"
    support = probe(broken(kind, attention))
    assert support.mode == "chain"
    assert said in support.reason


FAULTS = [IgnoresMasks, IgnoresPositions, IgnoresHalfTheMask]


def with_noise(model: PreTrainedModel, size: float) -> PreTrainedModel:
    """Each layer's outcome is off by a share of its length, otherwise at each width and batch.

    As GPUs round in half precision, and much more: the noise is what a real, deep model adds up.
    """

    def add_noise(_module: Any, _args: Any, hidden: torch.Tensor) -> torch.Tensor:
        dice = torch.Generator().manual_seed(hidden.shape[0] * hidden.shape[1])
        noise = torch.randn(hidden.shape, generator=dice).to(hidden.dtype)
        return hidden + noise * size * hidden.std(-1, keepdim=True)

    for layer in model.model.layers:
        layer.register_forward_hook(add_noise)
    return model


HALVES = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *HALVES])


@pytest.mark.parametrize("kind", [LlamaForCausalLM, *FAULTS])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((0.03, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(slow(size, dtype) for size in (0.0, 0.003) for dtype in (torch.float32, *HALVES)),
        slow(0.03, torch.float16),
    ],
)
def test_rounding_of_any_size_passes_and_hides_no_fault(size, kind, dtype):
    for seed in range(3):
        mode = probe(with_noise(broken(kind, seed=seed).to(dtype), size)).mode
        assert (mode == "tree") == (kind is LlamaForCausalLM), seed


@DTYPES
def test_wrong_slots_are_found_out(dtype, monkeypatch):
    """The wrong child's keys and values are kept instead of the right one's."""
    commit = TreeKV.commit

    def commit_others(kv, paths):
        commit(kv, [[0, *range(1, len(path))] for path in paths])

    monkeypatch.setattr(TreeKV, "commit", commit_others)
    for seed in range(4):
        reason = probe(broken(LlamaForCausalLM, seed=seed).to(dtype)).reason
        assert "slots" in reason, seed


# -- how deep ----------------------------------------------------------------------------------


def test_each_kind_of_layer_is_tried():
    model = tiny_model("gemma3")
    depth = TrialLayers.of(model)
    kinds = model.config.layer_types
    assert depth.num_layers is None or set(kinds[: depth.num_layers]) == set(kinds)
    assert TrialLayers.of(broken(LlamaForCausalLM, num_hidden_layers=6)).num_layers == 1


def test_a_model_that_somebody_listens_to_is_run_whole():
    model = broken(LlamaForCausalLM, num_hidden_layers=6)
    handle = model.model.layers[3].register_forward_hook(lambda *_: None)
    assert TrialLayers.of(model) == TrialLayers()
    handle.remove()
    model.model.layers[3]._hf_hook = object()
    assert TrialLayers.of(model) == TrialLayers()


class GivesTheLastLogits(Broken):
    """Always leaves out the logits of all tokens but the last one."""

    def begin(self, kwargs):
        kwargs["logits_to_keep"] = 1


def test_a_model_that_gives_too_few_logits_is_decoded_plainly():
    support = probe(broken(GivesTheLastLogits, num_hidden_layers=6))
    assert support.mode == "plain"
    assert "trying GivesTheLastLogits fails" in support.reason


class Amnesic(Broken):
    """Keeps nothing: neither trees nor chains can be checked against what came before."""

    def begin(self, kwargs):
        kwargs[KV] = None

    def read(self, mask):
        return mask[..., -mask.shape[2] :]


def test_a_model_that_forgets_its_past_is_decoded_plainly():
    assert probe(broken(Amnesic)).mode == "plain"


def test_running_out_of_memory_is_no_verdict():
    class Hungry(Broken):
        def begin(self, kwargs):
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        probe(broken(Hungry))


def test_probing_leaves_no_trace():
    """Neither in the random stream, nor in the weights' gradients, nor in the model's mode."""
    model = broken(LlamaForCausalLM)
    state = torch.get_rng_state()
    probe(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3-next", "bloom", "paligemma"])
def test_prompts_whose_tokens_see_later_ones_are_read_at_once(name):
    reason = probe(tiny_model(name)).read_at_once_reason
    assert (reason is not None) == (name == "paligemma")


def test_modules_that_change_while_they_are_looked_at() -> None:
    """As another thread's forward changes them, which puts functions in the place of methods."""
    model = new_model()
    attributes = vars(model.model.norm)

    def change() -> None:
        attributes[f"late_{len(attributes)}"] = 0

    class ChangingType(type):
        def __hash__(cls) -> int:
            change()
            return 0

    class Changing(metaclass=ChangingType):
        def __call__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            change()
            raise AttributeError(name)

    attributes["forward"] = Changing()
    (code,) = foreign_code(model, modules_of(model))
    assert "'model.norm' has the forward" in code.what

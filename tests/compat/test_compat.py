"""Each private or versioned name is there in the installed versions, and does what it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LogitsProcessorList,
)
from transformers.cache_utils import (
    DynamicIndexedLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

import selfspec
from selfspec.compat import (
    checkpoints,
    generation,
    grammars,
    kernels,
    modules,
    states,
    versions,
)
from selfspec.compat.authors import is_of_library
from tests.fakes import new_model, prompt, tiny_model
from tests.grammars import KINDS, TEXT, TOKENIZER, processors


def test_a_model_may_have_no_embeddings_that_transformers_finds():
    model = tiny_model()
    assert modules.embeddings_of(model) is model.model.embed_tokens

    class Without:
        def get_input_embeddings(self):
            raise NotImplementedError

    assert modules.embeddings_of(Without()) is None


# --- versions


def test_pyproject_allows_what_was_tried():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    first, last = re.search(r'"transformers>=([\d.]+),<([\d.]+)"', text).groups()
    assert first == ".".join(map(str, versions.OLDEST))
    assert last == ".".join(map(str, versions.UNTRIED))
    assert versions.untried_reason(transformers.__version__) is None


@pytest.mark.parametrize("version", ["5.25.0", "5.16.9", "6.0.0.dev0"])
def test_a_version_that_was_not_tried_is_named(version):
    assert version in versions.untried_reason(version)


def test_the_first_call_with_an_untried_version_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    spec, model = selfspec.SelfSpec(), selfspec.attach(new_model())
    for _ in range(2):
        model.generate(**prompt(), max_new_tokens=3, do_sample=False, assistant=spec)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "this is 5.99.0" in caplog.text


# --- generation


def test_what_a_recurrent_model_keeps_is_no_kv_cache():
    attention, mamba = tiny_model().config, tiny_model("mamba").config
    assert not states.keeps_only_states(DynamicCache())
    assert not states.keeps_only_states(DynamicCache(config=attention))
    assert not states.keeps_only_states(None)
    if generation.KV == "cache":  # Before, it had a class of its own.
        assert states.keeps_only_states(DynamicCache(config=mamba))


def inside_a_call(model, look, **options):
    """What `look` finds where a loop of somebody's own would decode."""
    found = []

    def loop(model, input_ids, **kwargs):
        found.append(look(model, input_ids, kwargs))
        return input_ids

    model.generate(**prompt(), custom_generate=loop, max_new_tokens=2, **options)
    return found[0]


@pytest.mark.parametrize("is_theirs", [False, True])
def test_a_cache_of_the_callers_is_marked(is_theirs):
    def look(_model, _ids, kwargs):
        return generation.belongs_to_caller(generation.kv_of(kwargs))

    given = {generation.KV: DynamicCache()} if is_theirs else {}
    assert inside_a_call(new_model(), look, **given) == is_theirs
    assert not generation.belongs_to_caller(None)


def test_who_runs_in_step_is_decided_as_by_generate(monkeypatch):
    model = new_model()
    assert generation.runs_in_step(model, True)
    assert not generation.runs_in_step(model, None)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert not generation.runs_in_step(model, None)
    monkeypatch.setattr("transformers.generation.utils.is_deepspeed_zero3_enabled", lambda: True)
    assert generation.runs_in_step(model, None)
    assert not generation.runs_in_step(model, False)


def test_windowed_layers_record_and_count():
    model = tiny_model("mistral")
    cache = DynamicCache(config=model.config)
    model(**prompt(), **{generation.KV: cache})
    states.record_past(cache)
    assert all(layer.record_past for layer in cache.layers)
    states.stop_recording_past(cache)
    assert not any(layer.record_past for layer in cache.layers)
    states.stop_recording_past(DynamicCache())
    assert not hasattr(DynamicLayer(), "record_past")


@pytest.mark.parametrize("name", ["qwen3-next", "bamba", "lfm2", "llama"])
def test_states_are_found_in_the_layers(name):
    model, cache = tiny_model(name), DynamicCache(config=tiny_model(name).config)
    kinds = {"lfm2": 1, "llama": 0}.get(name, 2)
    model(**prompt(), **{generation.KV: cache})
    assert states.columns_of(cache) == prompt()["input_ids"].shape[1]
    assert states.no_way_back(cache) is None
    names = [name for _, name, _ in states.states_by_place(cache.layers)]
    assert names == list(states.STATE_NAMES[:kinds])


def test_layers_without_the_states_of_their_model_cant_go_back():
    """As of a model that keeps them in its modules."""
    cache = DynamicCache(config=tiny_model("qwen3-next").config)
    assert states.no_way_back(cache) == "its KV cache can't be cropped"


class Compressing(DynamicLayer):
    """A model's own kind of layer, which may hold what `crop` does not know of."""


class Cropping(Compressing):
    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)


def test_a_models_own_kind_of_layer_is_cropped_only_by_a_method_of_its_own():
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), Cropping()]
    assert states.no_way_back(cache) is None
    cache.layers.append(Compressing())
    assert cache.is_croppable
    assert "of type Compressing, which has no crop() of its own" in states.no_way_back(cache)


def test_what_a_model_keeps_in_the_cache_itself_is_cropped_or_there_is_no_way_back():
    cache = DynamicCache()
    cache.position_ids = torch.arange(9).expand(3, 2, 9)  # As Qwen4-Exp keeps them in 5.17.
    assert states.no_way_back(cache) is None
    for _ in range(2):  # What is cropped already stays.
        states.crop_to(cache, 6)
        assert torch.equal(cache.position_ids, torch.arange(6).expand(3, 2, 6))
    cache.sums = torch.zeros(9)
    assert "holds 'sums', which crop() leaves as it is" in states.no_way_back(cache)


@pytest.mark.parametrize("name", ["nemotron-h", "zamba2", "bamba", "qwen3-5", "llama"])
def test_models_that_bound_time_steps_are_told(name):
    assert states.bounds_time_steps(tiny_model(name).modules()) == (
        name in ("nemotron-h", "zamba2")
    )
    if name == "bamba":
        assert states.bounds_time_steps(new_model(name, time_step_limit=(0.0, 9.0)).modules())


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("lfm2", ["convolution"]),
        ("qwen3-5", ["convolution", "delta rule"]),
        ("kimi-linear", ["convolution", "delta rule"]),
        ("bamba", ["convolution", "scan"]),
        ("zaya", []),
        ("llama", []),
    ],
)
def test_layers_call_functions_of_their_module(name, roles):
    """Each has one for a single token, too."""
    found = states.state_functions(tiny_model(name).modules())
    whole = [states.ROLES[function].removesuffix(" step") for _, function in found]
    assert sorted(whole) == sorted(2 * roles)
    assert all(callable(getattr(module, function)) for module, function in found)


def test_a_layer_of_a_cache_may_keep_nothing():
    model = tiny_model("nemotron-h")
    kept = [states.keeps_nothing(layer) for layer in DynamicCache(config=model.config).layers]
    assert kept in ([False, True, False, True], [False] * 4)  # Before 5.18, all have states.


def test_a_window_beside_states_is_cropped_and_the_states_stay():
    layer = LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=4)
    cache = Cache(layers=[layer])
    conv, state, keys = torch.ones(1, 2, 3), torch.ones(1, 2, 2), torch.ones(1, 1, 6, 2)
    layer.update_conv_state(conv)
    layer.update_recurrent_state(state)
    layer.update(keys, keys)
    states.record_past(cache)
    layer.update(2 * keys[:, :, :3], 2 * keys[:, :, :3])
    states.crop_to(cache, 6)
    assert torch.equal(layer.conv_states[0], conv)
    assert torch.equal(layer.recurrent_states[0], state)
    assert torch.equal(layer.keys[:, :, -3:], keys[:, :, :3])
    assert layer.get_seq_length() == 6


def test_what_chooses_columns_is_cropped_where_a_forward_broke_off():
    """It was kept for more columns than keys and values were."""
    layer = DynamicIndexedLayer()
    layer.update(torch.ones(1, 1, 6, 2), torch.ones(1, 1, 6, 2))
    layer.update_indexer(torch.ones(1, 6, 3))
    layer.update_indexer(torch.ones(1, 2, 3))
    layer.indexer_position_ids = torch.ones(3, 1, 8)  # Before 5.24, nobody has them.
    for _ in range(2):
        states.crop_to(Cache(layers=[layer]), 6)
        assert layer.get_seq_length() == layer.indexer_keys.shape[1] == 6
        assert layer.indexer_position_ids.shape == (3, 1, 6)


def test_functions_that_a_model_finds_by_name():
    for kind, names in (("llama", 2), ("mixtral", 3)):
        model = new_model(kind)
        if kind == "mixtral":
            model.set_experts_implementation("grouped_mm")
        functions = generation.functions_by_name(model)
        assert len(functions) == names
        assert all(map(is_of_library, functions.values()))


@pytest.mark.parametrize(
    ("kind", "keeps"), [("llama", False), ("gemma3", False), ("lfm2", True), ("mamba", True)]
)
def test_models_that_keep_a_state(kind, keeps):
    assert generation.keeps_a_state(new_model(kind)) is keeps


def test_experts_that_generate_switches_are_in_the_same_state(monkeypatch):
    """It does so while it decodes, on any device but a CPU."""
    model = new_model("mixtral")
    config = model.config
    model.set_experts_implementation("grouped_mm")
    outside, on_cpu = (generation.state_of_config(config, name) for name in ("cuda", "cpu"))
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with generation.decoding_switches(model):
        assert model.get_experts_implementation()[""] == "batched_mm"
        assert generation.state_of_config(config, "cuda") == outside
        assert generation.state_of_config(config, "cpu") != on_cpu
    model.set_experts_implementation("eager")
    assert generation.state_of_config(config, "cuda") != outside


# --- grammars


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_is_found_and_is_another_than_that_of_the_processor(kind):
    held = processors(kind)
    scores = torch.zeros(2, len(TOKENIZER))
    first = held(torch.tensor([[5], [6]]), scores.clone())
    found = grammars.grammars_of(held, 2)
    assert found[0] is not found[1]
    for grammar in found:
        for token in TOKENIZER.encode(TEXT):
            mask = grammar.mask()
            assert mask[token >> 5] >> (token & 31) & 1
            assert grammar.accept(token)
            grammar.rollback(1)
            assert not grammar.accept(TOKENIZER.convert_tokens_to_ids("#"))
            assert not grammar.accept(len(TOKENIZER))
            assert grammar.accept(token)
    start = grammars.grammars_of(held, 1)[0]
    allowed = torch.isfinite(first[0]).nonzero().flatten().tolist()
    assert all(start.mask()[token >> 5] >> (token & 31) & 1 for token in allowed)


def test_other_processors_hold_no_grammar():
    assert grammars.grammars_of([object(), LogitsProcessorList()], 2) == [None, None]


# --- modules


def test_hooks_are_seen():
    layer = nn.Linear(2, 2)
    assert modules.hooks_on(layer) == modules.hooks_of_all() == {}
    layer.register_forward_pre_hook(print)
    layer.register_forward_hook(print)
    assert list(modules.hooks_on(layer).values()) == [print, print]
    handle = nn.modules.module.register_module_forward_hook(print)
    assert list(modules.hooks_of_all().values()) == [print]
    assert not {*modules.hooks_of_all()} & {*modules.hooks_on(layer)}
    handle.remove()
    assert modules.hooks_of_all() == {}
    model = nn.Sequential(layer, nn.Linear(2, 2), nn.ReLU())
    model[1].forward = print
    walk = modules.modules_of(model)
    assert walk.hooked == [("0", model[0]), ("1", model[1])]
    assert walk.classes == {nn.Sequential: "", nn.Linear: "0", nn.ReLU: "2"}
    assert (walk.all, walk.tensors) == (list(model.modules()), list(model.parameters()))


def test_writes_are_counted():
    weight = nn.Linear(2, 2).requires_grad_(False).weight
    before = modules.num_writes(weight)
    weight.mul_(2)
    assert modules.num_writes(weight) == before + 1
    with torch.inference_mode():
        assert modules.num_writes(torch.ones(2)) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_compiled_code_is_seen_and_can_be_left_out():
    model = nn.Sequential(nn.Linear(2, 2))
    assert not modules.is_compiled(model)
    assert modules.inside_compiled(model) is model
    assert modules.inside_compiled(torch.compile(model)) is model
    assert modules.inside_wrappers(torch.compile(model)) is model
    model.compile()
    other = nn.Linear(2, 2)
    other.forward = torch.compile(other.forward)
    for each in (model, other):
        assert modules.is_compiled(each)
        with modules.uncompiled(each), modules.uncompiled(each):
            assert not modules.is_compiled(each)
        assert modules.is_compiled(each)
        first, second = modules.uncompiled(each), modules.uncompiled(each)
        with first:
            second.__enter__()
        assert not modules.is_compiled(each)  # As for a second thread, when the first one leaves.
        second.__exit__(None, None, None)
        assert modules.is_compiled(each)


def test_what_moves_a_module_is_called_by_its_name():
    layer, seen = nn.Linear(2, 2), []
    vars(layer)[modules.MOVES] = lambda *_args, **_kwargs: seen.append(1)
    layer.to(torch.float64)
    assert seen == [1]


def test_accelerates_hooks_are_seen():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    layer = nn.Linear(2, 2)
    assert not modules.has_moving_hook(layer)
    assert modules.execution_device(layer) is None
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    assert modules.has_moving_hook(layer)
    assert modules.execution_device(nn.Sequential(layer)) == torch.device("cpu")
    add_hook_to_module(layer, AlignDevicesHook(), append=True)
    assert [type(each) for each in modules.accelerate_hooks(layer)] == [AlignDevicesHook] * 2


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_are_seen():
    model = new_model()
    wrapper = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    layer = next(m for m in wrapper.modules() if hasattr(m, "merged_adapters"))
    states = [state_of(layer)]
    with wrapper.disable_adapter():
        states.append(state_of(layer))
    wrapper.merge_adapter()
    states.append(state_of(layer))
    layer.set_scale("default", 3.0)
    states.append(state_of(layer))
    assert len(set(states)) == len(states)
    wrapper.unmerge_adapter()
    layer.set_scale("default", 1.0)
    assert state_of(layer) == states[0]
    assert not modules.prompt_learning(model)
    assert modules.inside_wrappers(wrapper) is modules.inside_wrappers(model) is model


def state_of(module):
    return modules.modules_of(module).state


CHANGES = {
    "mode": lambda layer: layer.train(not layer.training),
    "switch": lambda layer: setattr(layer, "gradient_checkpointing", True),
    "dtype": lambda layer: layer.double(),
    "device": lambda layer: layer.to("meta"),
    "part": lambda layer: layer.register_module("part", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_state_of_a_module(change):
    layer = nn.Linear(2, 2)
    before = state_of(layer)
    assert state_of(layer) == before
    change(layer)
    after = state_of(layer)
    assert after != before
    assert state_of(layer) == after
    assert hash(after) == hash(state_of(layer))


# --- kernels


def test_memory_that_runs_out_on_a_cpu_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58)
    assert kernels.is_out_of_memory(caught.value)
    assert kernels.is_out_of_memory(torch.OutOfMemoryError())
    assert not kernels.is_out_of_memory(RuntimeError("shapes differ"))


# --- checkpoints


def test_names_are_translated():
    """Experts are joined as transformers does it; what it has no use for is left out."""
    model = tiny_model("qwen3-moe")
    experts = [f"model.layers.0.mlp.experts.{index}" for index in (10, 9)]
    names = [f"{each}.{name}_proj.weight" for each in experts for name in ("up", "gate", "down")]
    parts = checkpoints.parts_of(model, [*names, "model.norm.weight", "other"])
    assert parts.pop("model.norm.weight") == [checkpoints.Part("model.norm.weight")]
    down, gate_up = (parts.pop(name) for name in sorted(parts))
    assert not parts
    assert [part.name.split(".")[5:7] for part in down] == [["9", "down_proj"], ["10", "down_proj"]]
    order = [["9", "gate_proj"], ["9", "up_proj"], ["10", "gate_proj"], ["10", "up_proj"]]
    assert [part.name.split(".")[5:7] for part in gate_up] == order


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", generation.KV_NAMES)
def test_a_cache_is_taken_and_given_under_both_names(name):
    """From 5.24 on under both, before under the older one."""
    if generation.KV == "past_key_values" != name:
        pytest.skip("this version knows the older name alone")
    model, lengths = selfspec.attach(new_model()), []
    for extra in ({}, {"assistant": selfspec.SelfSpec(budget="fixed")}):
        asked = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
        output = model.generate(**prompt(), **asked, **{name: DynamicCache()}, **extra)
        lengths.append((output.sequences.tolist(), getattr(output, name).get_seq_length()))
    assert lengths[0] == lengths[1]


# --- templates


def test_the_variables_of_chat_templates():
    class Owner:
        chat_template: object = (
            "{% set b = 1 %}{{ a.images }}{{ b }}{% generation %}x{% endgeneration %}"
        )

    assert generation.template_variables(Owner) == {"a"}
    Owner.chat_template = {"default": "{{ a }}{{ size }}", "tool_use": "{{ a }}{{ tools }}"}
    assert generation.template_variables(Owner) == {"a"}
    Owner.chat_template = None
    assert not generation.template_variables(Owner)

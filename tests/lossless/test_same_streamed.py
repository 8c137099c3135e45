"""Streamed and offloaded weights: the ids of the model in memory, plain and with drafts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec import SelfSpec, UnsupportedError, attach, load
from selfspec.weights.packing import is_packed_in_place
from selfspec.weights.streamed.stream import is_streamed
from tests.fakes import prompt
from tests.lossless.same import (
    FIXED,
    GREEDY,
    MODES,
    Call,
    assert_same_ids,
    doubting,
    run,
    run_both,
    slow,
)
from tests.streamed import load_tightly, saved_model

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "mixtral": {},
    "qwen3-moe": {},
    "deepseek-v3": {},
    "gpt2": {"n_layer": 6},
    "opt": {},
    "bloom": {"n_layer": 6},
}
LIKE_OTHERS = ("qwen2", "gemma2", "qwen3-moe", "deepseek-v3", "opt")


def streamed_pair(folder: Path, kind: str, **options: Any) -> tuple[Any, Any]:
    """The model in memory, and the same one with all layers streamed."""
    changes = KINDS[kind]
    own = {"num_hidden_layers": None} if "n_layer" in changes else {}
    name = kind.partition(",")[0]
    model = saved_model(folder, name, **{k: v for k, v in (own | changes).items() if v is not None})
    attention = model.config._attn_implementation
    streamed = load_tightly(folder, **options)
    streamed.set_attn_implementation(attention)
    assert is_streamed(streamed)
    return model, streamed


@pytest.mark.parametrize("kind", [slow(kind) if kind in LIKE_OTHERS else kind for kind in KINDS])
def test_plain_and_with_drafts(kind: str, call: Call, tmp_path: Path) -> None:
    model, streamed = streamed_pair(tmp_path, kind)
    inputs = call.inputs
    stock = run(model, inputs, **call.options)
    spec, trees = doubting(stock.ids, inputs), kind != "bloom"
    both = run_both(streamed, inputs, spec, drafts=trees, **call.options)
    assert_same_ids(both.stock.ids, stock.ids)
    assert both.stats.forward == "streamed"
    assert both.stats.eager_reason is None


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_any_budget_from_the_least_to_everything(shards: str, tmp_path: Path) -> None:
    model, inputs = saved_model(tmp_path, shards=shards), prompt()
    stock, numbers = run(model, inputs, **GREEDY), []
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards != "1GB")
    for share in (60, 80, 100):
        streamed = load(str(tmp_path), max_memory=f"{share}%", max_length=1)
        assert_same_ids(run(streamed, inputs, **GREEDY).ids, stock.ids)
        numbers.append(len(getattr(streamed, "hf_device_map", {})))
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 0
    assert not is_streamed(streamed)


def test_a_step_reads_each_streamed_layer_once(tmp_path: Path) -> None:
    _, streamed = streamed_pair(tmp_path, "llama")
    buffers = streamed.selfspec_stream.reader.buffers
    with torch.no_grad():
        streamed(**prompt())
        before = buffers.bytes_read
        for _ in range(10):
            streamed(**prompt())
    layer = (buffers.bytes_read - before) / 60
    assert 60 * layer <= buffers.bytes_read <= 70 * layer


def test_captured_forwards_give_way(tmp_path: Path) -> None:
    _, streamed = streamed_pair(tmp_path, "llama")
    spec = SelfSpec(forward="graph", **FIXED)
    both = run_both(streamed, prompt(), spec, drafts=False, **GREEDY)
    assert both.stats.forward == "streamed"
    assert "its weights are streamed" in str(both.stats.eager_reason)


@pytest.mark.usefixtures("packs_at_once")
@pytest.mark.parametrize("kind", [slow("llama"), "llama, tied"])
def test_layers_in_memory_are_packed_in_place(kind: str, tmp_path: Path) -> None:
    """Their weights are freed, so plain calls compute from the copies too."""
    model = saved_model(tmp_path, "llama", **KINDS[kind])
    streamed = load(str(tmp_path), max_memory="80%", max_length=1)
    both = [run(each, prompt(2), **GREEDY).ids for each in (model, streamed)]
    assert_same_ids(both[1], both[0])
    layers = [layer.mlp.up_proj for layer in streamed.model.layers]
    resident = [layer for layer in layers if is_packed_in_place(layer)]
    assert 0 < len(resident) < 6
    for spec in (SelfSpec(), SelfSpec(**FIXED)):
        assert_same_ids(run(streamed, prompt(2), custom_generate=spec, **GREEDY).ids, both[0])
    theirs = model.model.layers[layers.index(resident[0])].mlp.up_proj
    assert torch.equal(resident[0].weight.detach(), theirs.weight)
    assert all(is_packed_in_place(layer) for layer in resident)
    assert streamed.lm_head.weight.isfinite().all()
    assert_same_ids(run(streamed, prompt(2), **GREEDY).ids, both[0])


def set_data(weight: Any) -> None:
    weight.data = torch.ones(weight.shape)


@pytest.mark.usefixtures("packs_at_once")
def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    """In streamed layers, and in those that are packed."""
    saved_model(tmp_path)
    streamed = load(str(tmp_path), max_memory="80%", max_length=1)
    stock = run(streamed, prompt(), **GREEDY).ids
    run(streamed, prompt(), assistant=SelfSpec(), **GREEDY)
    layers = [layer.mlp.up_proj.weight for layer in streamed.model.layers]
    assert len(set(map(type, layers))) == 2
    writes = (set_data, torch.Tensor.zero_, lambda weight: weight.data)
    for write, weight in itertools.product(writes, layers):
        with pytest.raises(UnsupportedError, match="weights of a streamed model can't be written"):
            write(weight)
    assert_same_ids(run(streamed, prompt(), **GREEDY).ids, stock)


def test_a_call_that_breaks_off_leaves_a_model_that_works(tmp_path: Path) -> None:
    model, streamed = streamed_pair(tmp_path, "llama")

    def break_off(*_args: object) -> None:
        raise KeyboardInterrupt

    for layer in streamed.model.layers:
        handle = layer.self_attn.register_forward_pre_hook(break_off)
        with pytest.raises(KeyboardInterrupt):
            run(streamed, prompt(), **GREEDY)
        handle.remove()
        # No layer is left with views of a buffer that is read over.
        assert all(each.isnan().all() for each in layer.parameters())
        run_both(streamed, prompt(), SelfSpec(), drafts=False, max_new_tokens=4, **GREEDY)
    assert_same_ids(run(streamed, prompt(), **GREEDY).ids, run(model, prompt(), **GREEDY).ids)


# models that accelerate offloads, to memory or to disk

MAPS: dict[str, dict[str, str]] = {
    "some layers on disk": {
        "model.embed_tokens": "cpu",
        **{f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(6)},
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "all on disk": {"": "disk"},
}


def offloaded(folder: Path, where: str) -> Any:
    """The model of a folder with parts of it on disk."""
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=MAPS[where], offload_folder=folder / "offloaded"
    )


@pytest.mark.parametrize(
    ("where", "mode"),
    [
        ("some layers on disk", "greedy"),
        ("all on disk", "sample"),
        slow("some layers on disk", "sample"),
        slow("all on disk", "greedy"),
    ],
)
@pytest.mark.parametrize("name", ["llama", slow("mixtral")])
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`:UserWarning")
def test_trees_over_weights_on_disk(name: str, where: str, mode: str, tmp_path: Path) -> None:
    inputs = prompt(3 if mode == "sample" else 1)
    stock = run(saved_model(tmp_path, name), inputs, **MODES[mode])
    model = attach(offloaded(tmp_path, where))
    both = run_both(model, inputs, entrance="assistant", **MODES[mode])
    assert_same_ids(both.stock.ids, stock.ids)
    assert SelfSpec().support(model).mode == "tree"
    assert sum(n * times for n, times in both.stats.accepted_lengths.items()) > 5

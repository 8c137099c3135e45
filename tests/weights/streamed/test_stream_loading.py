"""`load` with a limit: what it makes of a folder, what it refuses, what it leaves behind."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from selfspec import (
    ConfigError,
    SelfSpec,
    UnsupportedError,
    WeightsError,
    attach,
    detach,
    load,
)
from selfspec.weights.streamed.stream import is_streamed
from tests.fakes import prompt
from tests.lossless.same import GREEDY, NUM_NEW, in_threads, run
from tests.streamed import least_memory, load_tightly, saved_model

FILE, NORM = "model.safetensors", "model.norm.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    saved_model(tmp_path, max_position_embeddings=64)
    return tmp_path


def open_files(folder: Path) -> list[str]:
    paths = [each.path for each in psutil.Process().open_files()]
    return [path for path in paths if path.startswith(str(folder))]


def test_it_is_the_model_of_from_pretrained(folder):
    GenerationConfig(top_k=7, do_sample=True).save_pretrained(folder)
    before = torch.get_rng_state()
    model = load_tightly(folder)
    assert torch.equal(torch.get_rng_state(), before)
    stock = type(model).from_pretrained(folder)
    assert not model.training
    assert model.device == stock.device
    assert model.dtype == stock.dtype
    assert model.config.to_dict() == stock.config.to_dict()
    assert model.generation_config.to_dict() == stock.generation_config.to_dict()
    assert model.num_parameters() == stock.num_parameters()
    own, stocks = dict(model.named_buffers()), dict(stock.named_buffers())
    assert own.keys() == stocks.keys()
    assert all(torch.equal(own[name], stocks[name]) for name in own)
    assert model._non_persistent_buffers_set == stock._non_persistent_buffers_set


def test_the_least_that_will_do_is_named(folder):
    least = least_memory(folder, max_length=1)
    assert is_streamed(load(str(folder), max_memory=least, max_length=1))
    longer = least_memory(folder, max_length=60)
    assert int(longer.removesuffix("KB")) - int(least.removesuffix("KB")) >= 40


def test_what_such_a_model_refuses(folder, tmp_path):
    model = load_tightly(folder)
    for refused in (
        lambda: model.to("cpu"),
        lambda: model.half(),
        lambda: model.cuda(),
        lambda: model.state_dict(),
        lambda: model.model.state_dict(),
        lambda: model.save_pretrained(tmp_path / "copy"),
        lambda: model.push_to_hub("nowhere"),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: model.requires_grad_(),
        lambda: model(inputs_embeds=torch.randn(1, 3, 32, requires_grad=True)),
    ):
        with pytest.raises(UnsupportedError, match="a streamed model"):
            refused()
    assert not (tmp_path / "copy").exists()


def rewritten(folder: Path, **changes: torch.Tensor | None) -> None:
    """Saves the weights again with some of them changed, or left out where that is None."""
    weights = load_file(folder / FILE) | changes
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / FILE, metadata={"format": "pt"})


def in_files_of_torch(folder: Path) -> None:
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    (folder / FILE).unlink()


def without_a_shard(folder: Path) -> None:
    in_shards(folder)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def with_a_torn_index(folder: Path) -> None:
    in_shards(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def in_shards(folder: Path) -> None:
    (folder / FILE).unlink()
    saved_model(folder, shards="20KB")


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))


UP_PROJ = "model.layers.3.mlp.up_proj.weight"
DAMAGED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "files of torch": (in_files_of_torch, WeightsError, "must hold model.safetensors"),
    "no norm": (lambda to: rewritten(to, **{NORM: None}), WeightsError, NORM),
    "no projection": (lambda to: rewritten(to, **{UP_PROJ: None}), WeightsError, UP_PROJ),
    "another shape": (lambda to: rewritten(to, **{NORM: torch.ones(3)}), WeightsError, NORM),
    "no second shard": (without_a_shard, WeightsError, "model-00002-of"),
    "a torn index": (with_a_torn_index, WeightsError, "model.safetensors.index.json"),
    "quantised": (quantised, UnsupportedError, "quantised"),
}


@pytest.mark.parametrize(("damage", "error", "named"), DAMAGED.values(), ids=DAMAGED)
def test_what_can_not_be_streamed_is_named(folder, damage, error, named):
    damage(folder)
    with pytest.raises(error, match=named):
        load(str(folder), max_memory="1GB")


def test_accelerate_is_named_where_it_is_missing(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UnsupportedError, match="pip install accelerate"):
        load(str(folder), max_memory="1GB")


def test_a_file_that_changes_while_the_model_lives(folder):
    model = load_tightly(folder)
    expected = run(model, prompt(), **GREEDY).ids
    stamp = (folder / FILE).stat().st_mtime_ns
    os.utime(folder / FILE, ns=(stamp, stamp + 1))
    with pytest.raises(WeightsError, match="it was changed since"):
        run(model, prompt(), **GREEDY)
    os.utime(folder / FILE, ns=(stamp, stamp))
    assert torch.equal(run(model, prompt(), **GREEDY).ids, expected)


def test_two_threads_take_turns(folder):
    model, texts = load_tightly(folder), {}
    alone = [run(model, prompt(seed=seed), **GREEDY).ids for seed in range(3)]

    def decode(seed: int) -> None:
        texts[seed] = model.generate(**prompt(seed=seed), max_new_tokens=NUM_NEW, do_sample=False)

    in_threads(decode, 3, 3)
    assert all(torch.equal(texts[seed], alone[seed]) for seed in range(3))


def test_nothing_is_left_behind(folder):
    with pytest.raises(ConfigError):
        load(str(folder), max_memory=1)
    assert not open_files(folder)
    model = load_tightly(folder)
    run(model, prompt(), **GREEDY)
    assert open_files(folder)
    thread, gone = model.selfspec_stream.reader._thread, weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()
    assert not open_files(folder)


@pytest.mark.slow
def test_a_process_ends_in_the_midst_of_reading(folder):
    code = (
        "import selfspec, sys\n"
        "model = selfspec.load(sys.argv[1], max_memory=sys.argv[2], max_length=1)\n"
        "print(type(model).__name__)"
    )
    least = least_memory(folder, max_length=1)
    command = [sys.executable, "-c", code, str(folder), least]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "LlamaForCausalLM\n", "")


@pytest.mark.long
def test_memory_stays_within_the_budget(tmp_path):
    """Buffers and what is resident, counted as the process holds them."""
    saved_model(
        tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, vocab_size=1000
    )
    gc.collect()
    before = psutil.Process().memory_info().rss
    model = load_tightly(tmp_path, max_length=64)
    run(model, prompt(), **GREEDY)
    taken = psutil.Process().memory_info().rss - before
    whole = sum(weight.numel() for weight in model.parameters()) * 4
    budget = int(least_memory(tmp_path, max_length=64).removesuffix("MB")) * 10**6
    assert budget < whole / 3
    assert taken < budget + 20 * 10**6


def test_detach_lets_go_of_a_model_at_once(folder):
    """An attached model refers to itself, and would wait for the garbage collector."""
    model = attach(load_tightly(folder))
    run(model, prompt(), assistant=SelfSpec(), **GREEDY)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(detach(model))
        del model
        assert gone() is None
    finally:
        gc.enable()

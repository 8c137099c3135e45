"""A rounded model writes with drafts what it writes without, and only where it can be had."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from selfspec import (
    ConfigError,
    SelfSpec,
    UnsupportedError,
    WeightsError,
    attention,
    load,
)
from selfspec.attention import EXACT_ATTENTION
from selfspec.compat.generation import KV
from selfspec.plugin import loading
from selfspec.weights import held_weight, rounded_model
from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.rounded import products_of_a_step
from selfspec.weights.rounded_model import rounded_bits
from selfspec.weights.streamed import rounded_file
from selfspec.weights.streamed.stream import is_streamed
from tests.batch.test_generate_many import assert_as_alone, prompts
from tests.fakes import prompt
from tests.lossless.same import (
    GREEDY,
    Call,
    assert_same_ids,
    doubting,
    recorded_forwards,
    run,
    run_both,
    slow,
)
from tests.streamed import least_memory, load_tightly, saved_model

TIED = {"tie_word_embeddings": True}
MIXED = {"layer_types": ["conv", "full_attention"] * 3}
KINDS = {"llama": {}, "llama, tied": TIED, "gemma2": {}, "bloom": {}, "lfm2": MIXED}


# Shapes that 4 bits can have.
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def loaded(folder: Path, kind: str = "llama", weights: str = "int8", **changes: Any) -> Any:
    saved_model(folder, kind.partition(",")[0], **KINDS[kind] | SIZES | changes)
    model = load(str(folder), weights=weights)
    assert rounded_bits(model) == int(weights[-1])
    return model


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        *(("llama", "int8"), ("llama", "int4"), ("llama, tied", "int4")),
        *(("gemma2", "int8"), ("bloom", "int4"), ("lfm2", "int8")),
        *(slow("llama, tied", "int8"), slow("gemma2", "int4")),
        *(slow("bloom", "int8"), slow("lfm2", "int4")),
    ],
)
def test_plain_and_with_drafts(kind: str, weights: str, call: Call, tmp_path: Path) -> None:
    model = loaded(tmp_path, kind, weights)
    assert model.dtype is torch.float32
    stock = run(model, call.inputs, **call.options)
    spec = doubting(stock.ids, call.inputs)
    takes_trees = kind not in ("bloom", "lfm2")
    both = run_both(model, call.inputs, spec, drafts=takes_trees, **call.options)
    assert_same_ids(both.stock.ids, stock.ids)
    assert both.stats.forward == "packed"


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("llama", "int8"), ("llama, tied", "int4"), slow("llama, tied", "int8")],
)
def test_logits_of_steps_do_not_depend_on_how_many_tokens_there_are(
    kind: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention adds up in another order for several tokens. Rounding must make nothing of it."""
    model, ids = loaded(tmp_path, kind, weights), torch.arange(64)[None] % 50
    assert model.config._attn_implementation == EXACT_ATTENTION
    for num_before in (0, 2048):
        monkeypatch.setattr(attention, "_AT_ONCE", 1 << 18 if not num_before else 1)
        with products_of_a_step():
            whole = [logits_by(width, model, ids, num_before) for width in (1, 8, 64)]
        assert torch.equal(whole[0], whole[1])
        assert torch.equal(whole[0], whole[2])


def logits_by(width: int, model: Any, ids: torch.Tensor, num_before: int) -> torch.Tensor:
    """The logits of a text that is read so many tokens at a time, after others."""
    kv, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        if num_before:
            model(torch.arange(num_before)[None] % 45, **{KV: kv})
        for part in torch.split(ids, width, 1):
            logits.append(model(part, **{KV: kv}).logits)
    return torch.cat(logits, 1)


def test_trees_of_any_width(tmp_path: Path) -> None:
    model, options = loaded(tmp_path), {**GREEDY, "max_new_tokens": 100}
    stock = run(model, prompt(), **options)
    spec = doubting(stock.ids, prompt(), max_nodes=100)
    with recorded_forwards(model) as widths:
        ours = run(model, prompt(), assistant=spec, **options)
    assert_same_ids(ours.ids, stock.ids)
    assert sum(width > 64 for width in widths) > 10


def test_many_prompts(tmp_path: Path) -> None:
    given = prompts((20, 3, 12, 9))
    assert_as_alone(loaded(tmp_path), given, SelfSpec(), max_new_tokens=20, **GREEDY)


@pytest.mark.parametrize(
    ("kind", "weights", "call"),
    [
        ("llama", "int8", Call(3, "sample")),
        ("lfm2", "int4", Call(1, "greedy")),
        slow("llama", "int4", Call(3, "sample")),
        slow("llama, tied", "int4", Call(1, "greedy")),
        slow("gemma2", "int8", Call(3, "sample")),
    ],
)
def test_layers_that_are_read_from_disk(
    kind: str, weights: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of the same weights in memory, whichever layers are streamed.

    In 8 bits that is so on a CPU without VNNI, where both are multiplied by torch's own products.
    """
    monkeypatch.setattr(rounded_model, "has_vnni", lambda: False)
    whole = loaded(tmp_path, kind, weights)
    streamed = load_tightly(tmp_path, weights=weights)
    assert is_streamed(streamed)
    assert rounded_bits(streamed) == rounded_bits(whole)
    ids = call.inputs["input_ids"]
    with torch.no_grad():
        assert torch.equal(streamed(ids).logits, whole(ids).logits)
    stock = run(whole, call.inputs, **call.options)
    spec = doubting(stock.ids, call.inputs)
    both = run_both(streamed, call.inputs, spec, drafts=kind != "lfm2", **call.options)
    assert_same_ids(both.ours.ids, stock.ids)
    weight = next(each for each in streamed.parameters() if type(each) is PackedWeight)
    with pytest.raises(UnsupportedError, match="can't be written"):
        weight.zero_()


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "selfspec" / "rounded"


def test_rounded_weights_are_written_once_for_each_model(tmp_path: Path, user: Path) -> None:
    outcomes = []
    for number, name in enumerate(("a", "a", "b"), 1):
        if not (tmp_path / name).is_dir():
            saved_model(tmp_path / name, hidden_act="silu" if name == "a" else "gelu")
        model = load_tightly(tmp_path / name, weights="int8")
        with torch.no_grad():
            outcomes.append(model(**prompt()).logits)
        assert len(list(user.glob("*.weights"))) == max(number - 1, 1)
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_files_of_an_earlier_version_go(
    tmp_path: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the same weights, once there is a new one. One that will do is not made anew."""
    for name in ("a", "b"):
        saved_model(tmp_path / name)
        load_tightly(tmp_path / name, weights="int8")
    before = set(user.glob("*.weights"))
    monkeypatch.setattr("transformers.__version__", "another version")
    load_tightly(tmp_path / "a", weights="int8")
    assert set(user.glob("*.weights")) == before
    monkeypatch.setattr(rounded_file, "_VERSION", 0)
    load_tightly(tmp_path / "a", weights="int8")
    now = set(user.glob("*.weights"))
    assert (len(now), len(now & before)) == (2, 1)
    os.utime(tmp_path / "a" / "model.safetensors", (1, 1))  # As if they were downloaded again.
    load_tightly(tmp_path / "a", weights="int8")
    later = set(user.glob("*.weights"))
    assert (len(later), later & now) == (2, now & before)


def test_a_file_that_was_cut_off_is_made_anew(tmp_path: Path, user: Path) -> None:
    saved_model(tmp_path)
    load_tightly(tmp_path, weights="int8")
    (path,) = user.glob("*.weights")
    whole, left = path.read_bytes(), user / ".other.weights.0123.tmp"
    path.write_bytes(whole[:-1])
    left.write_bytes(b"of a process that was killed")
    load_tightly(tmp_path, weights="int8")
    assert path.read_bytes() == whole
    assert not left.exists()


def test_what_keeps_rounded_weights_from_being_written(
    tmp_path: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is too small is known before. No failure leaves anything behind."""
    saved_model(tmp_path)
    options = {"weights": "int8", "max_length": 1, "max_memory": least_memory(tmp_path)}
    with pytest.raises(ConfigError, match="max_memory must be at least"):
        load(str(tmp_path), **options | {"max_memory": 1})
    assert not user.exists()
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: full)
        with pytest.raises(WeightsError, match=r"0\.0 GB are needed"):
            load(str(tmp_path), **options)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: os.truncate("/nowhere", 0))
        with pytest.raises(WeightsError, match=r"must be written to .*user.*; make room there"):
            load(str(tmp_path), **options)
    assert [path.name for path in user.iterdir()] == [".lock"]
    user.parent.joinpath("rounded", ".lock").unlink()
    user.rmdir()
    user.write_text("no folder")
    with pytest.raises(WeightsError, match=r"must be written to .*user.*point XDG_CACHE_HOME to"):
        load(str(tmp_path), **options)


def test_what_is_saved_are_the_rounded_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(tmp_path / "first", "llama, tied")
    held_weight._say_that_it_is_a_copy.cache_clear()
    with caplog.at_level(logging.WARNING, "selfspec"):
        model.save_pretrained(tmp_path / "second")
    assert "it gets, and saves, copies, with the values of rounded" in caplog.text
    torch.save(model, tmp_path / "model.pt")
    unpickled = torch.load(tmp_path / "model.pt", weights_only=False)
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path / "second"), unpickled):
        for name, weight in again.named_parameters():
            assert torch.equal(weight, model.get_parameter(name))
        assert again.lm_head.weight is again.model.embed_tokens.weight


def test_what_can_not_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UnsupportedError, match="most of its weights in linear layers"):
        load(str(tmp_path / "gpt2"), weights="int8")
    saved_model(tmp_path)
    with pytest.raises(ConfigError, match="weights must be 'int8', 'int4' or left out"):
        load(str(tmp_path), weights="int3")
    monkeypatch.setattr(loading, "rounding_reason", lambda _: "this build of torch has none")
    with pytest.raises(UnsupportedError, match="can't be had here: this build of torch has none"):
        load(str(tmp_path), weights="int8")
    monkeypatch.setattr(loading, "_device", torch.device)
    with pytest.raises(ConfigError, match="weights are for a CPU"):
        load(str(tmp_path), weights="int8", device="cuda")


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="AVX2 is tested already"
)
def test_all_that_with_avx2() -> None:
    """Torch chooses its instructions when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_chat_whose_turns_are_kept(tmp_path: Path) -> None:
    model, options = loaded(tmp_path, weights="int4"), {**GREEDY, "max_new_tokens": 8}
    ids = prompt(1)["input_ids"]
    spec = SelfSpec(kept_kv="100MB")
    for _ in range(3):
        stock = run(model, {"input_ids": ids}, **options)
        ours = run(model, {"input_ids": ids}, assistant=spec, **options)
        assert_same_ids(ours.ids, stock.ids)
        ids = torch.cat([ours.ids, prompt(1)["input_ids"][:, :5]], 1)

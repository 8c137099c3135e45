"""From names to models."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from selfspec.cli.shared import model_loading as loading
from selfspec.cli.shared.model_loading import load_model, load_tokenizer, quiet
from selfspec.cli.shared.options import ModelOptions, RunOptions
from selfspec.errors import CliError
from selfspec.run.streamed import is_streamed
from tests.streamed import least_memory, saved_model


def load(folder, **options):
    options = RunOptions(model=None if folder is None else str(folder), **options)
    return load_model(options, load_tokenizer(options))


@pytest.fixture
def broken(plain_folder, tmp_path):
    """A copy that may be damaged."""
    folder = tmp_path / "model"
    shutil.copytree(plain_folder, folder)
    return folder


def test_auto_is_as_the_model_was_saved(plain_folder, tmp_path):
    loaded = load(plain_folder, device="cpu")
    assert loaded.model.dtype == torch.float32
    assert str(loaded).endswith("(0.0M parameters, float32, cpu)")
    loaded.model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu").model.dtype == torch.bfloat16


def test_dtypes_that_are_not_the_files(plain_folder):
    """The embedded model is saved in half precision, and is float32."""
    assert load(None).model.dtype == torch.float32
    assert load(plain_folder, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16


def test_the_embedded_model_is_the_default(plain_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "TINY", tmp_path / "tiny")
    with pytest.raises(CliError, match="embedded model is missing"):
        load(None)
    shutil.copytree(plain_folder, tmp_path / "tiny")
    assert load(None).name == "tiny"


def test_quiet_puts_everything_back():
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with quiet():
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_weights_that_are_not_there_are_not_made_up(broken):
    file = broken / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CliError, match=r"its files lack the weights 'model.norm.weight'$"):
        load(broken)


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("model.safetensors", "torn", r"the model of '.*' can't be loaded"),
        ("config.json", json.dumps({"name": "nothing known"}), "can't be loaded"),
        ("config.json", json.dumps({"model_type": "vit"}), r"model of '.*' can't be .*(vit|ViT)"),
    ],
)
def test_files_that_are_no_model(broken, name, contents, said):
    (broken / name).write_text(contents)
    with pytest.raises(CliError, match=said):
        load(broken)


@pytest.fixture
def deep_folder(plain_folder, tmp_path):
    """The tokenizer of `plain_folder`, with a model of enough layers to stream some."""
    tokenizer = load_tokenizer(ModelOptions(model=plain_folder))
    tokenizer.save_pretrained(tmp_path)
    saved_model(tmp_path, vocab_size=len(tokenizer))
    return tmp_path


def test_a_budget_of_memory_streams_layers(deep_folder):
    loaded = load(deep_folder, device="cpu", max_memory=least_memory(deep_folder))
    assert is_streamed(loaded.model)
    assert str(loaded).endswith("(0.1M parameters, float32, cpu)")
    assert not is_streamed(load(deep_folder, device="cpu", max_memory="100%").model)


def test_generate_within_a_budget(run, fails, deep_folder):
    options = ("generate", deep_folder, "--max-new-tokens", "9", "--device", "cpu")
    text = run(*options, stdin="the fox").stdout
    least = least_memory(deep_folder)
    streamed = run(*options, "--max-memory", least, "--stats", stdin="the fox")
    assert streamed.stdout == text
    assert "streamed forwards" in streamed.stderr
    line = fails(*options, "--max-memory", "1KB", stdin="the fox")
    assert f"max_memory must be at least {least} for this model" in line
    assert "--max-memory must be a number" in fails(*options, "--max-memory", "big", stdin="a")
    # A share is an amount, though too small a one for this model.
    assert "must be at least" in fails(*options, "--max-memory", "25%", stdin="a")

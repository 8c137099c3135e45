"""From names to models, and what is said of those that can't be loaded."""

import json
import shutil
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch

from selfspec.cli import writer as writer_module
from selfspec.cli.app import app
from selfspec.cli.loading import load_model, load_tokenizer, memory_note
from selfspec.cli.options import ModelOptions, RunOptions, WriteOptions
from selfspec.cli.writer import Writer, load_writer
from selfspec.errors import CliError, ConfigError
from selfspec.machine import memory
from selfspec.machine.hub import check_model_name, find_file
from selfspec.weights.packing import is_packed_in_place
from tests.fakes import fake_trials, packs_here
from tests.streamed import least_memory, saved_model


def load(folder, **options):
    options = RunOptions(model=None if folder is None else str(folder), **options)
    load_tokenizer(options)
    return load_model(options)


def test_dtypes(plain_folder, tmp_path):
    """The embedded model is saved in half precision, and is float32."""
    assert load(None).dtype == torch.float32
    model = load(plain_folder, device="cpu", dtype="bfloat16")
    tokenizer = load_tokenizer(ModelOptions(model=plain_folder))
    loaded = Writer(WriteOptions(model="tiny"), model, tokenizer)
    assert str(loaded) == "tiny (0.0M parameters, bfloat16, cpu)"
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    assert load(tmp_path).dtype == torch.bfloat16


def test_rounded_weights(plain_folder):
    model = load(plain_folder, device="cpu", weights="int8")
    loaded = Writer(WriteOptions(model="tiny"), model, None)
    assert str(loaded) == "tiny (0.0M parameters in 8 bits, float32, cpu)"


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("model.safetensors", "torn"),
        ("config.json", json.dumps({"name": "nothing known"})),
        ("config.json", json.dumps({"model_type": "vit"})),
        ("config.json", "[]"),
        ("tokenizer.json", "torn"),
    ],
)
def test_files_that_are_no_model(plain_folder, tmp_path, name, contents):
    folder = shutil.copytree(plain_folder, tmp_path / "model")
    (folder / name).write_text(contents)
    with pytest.raises(CliError, match="can't be loaded") as caught:
        load(folder)
    assert len(str(caught.value)) < 500


def test_a_device_that_is_not_there(plain_folder):
    with pytest.raises(ConfigError, match="device must"):
        load(plain_folder, device="toaster")


def test_weights_that_take_more_memory_than_there_is(plain_folder, monkeypatch):
    """A note says what to do. It is no error: the system may have a way."""
    needed = 4 * sum(each.numel() for each in load(plain_folder).parameters())
    asked = {"model": str(plain_folder), "device": "cpu"}
    monkeypatch.setattr(memory, "free_memory", lambda: needed)
    assert memory_note(RunOptions(**asked)) is None
    monkeypatch.setattr(memory, "free_memory", lambda: needed - 1)
    assert "--max-memory" in memory_note(RunOptions(**asked))
    others = {"max_memory": "1MB"}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"weights": "int8"}
    for other in others:
        assert memory_note(RunOptions(**{**asked, **other})) is None
    assert memory_note(RunOptions(model="owner/nothing", device="cpu")) is None


def test_within_a_memory_layers_are_streamed(run, fails, plain_folder, tmp_path):
    """The tokenizer of `plain_folder`, with a model of enough layers to stream some."""
    tokenizer = load_tokenizer(ModelOptions(model=plain_folder))
    tokenizer.save_pretrained(tmp_path)
    saved_model(tmp_path, vocab_size=len(tokenizer))
    options = ("generate", tmp_path, "--max-new-tokens", "9", "--device", "cpu")
    text = run(*options, stdin="the fox").stdout
    least = least_memory(tmp_path)
    streamed = run(*options, "--max-memory", least, "--stats", stdin="the fox")
    assert streamed.stdout == text
    assert "streamed forwards" in streamed.stderr
    # A share is an amount, though too small a one for this model.
    line = fails(*options, "--max-memory", "25%", stdin="a")
    assert f"max_memory must be at least {least}" in line


def test_who_writes_for_long_packs_in_place(plain_folder, monkeypatch):
    """What is compared with itself does not."""
    fake_trials(monkeypatch)
    asked = RunOptions(model=plain_folder, device="cpu")
    model = load_model(asked, packs=True)
    assert any(map(is_packed_in_place, model.modules())) == packs_here()
    assert not any(each.requires_grad for each in model.parameters())
    assert not any(map(is_packed_in_place, load_model(asked).modules()))


def test_a_draft_model_is_packed_for_whoever_names_one(plain_folder, monkeypatch):
    fake_trials(monkeypatch)
    options = WriteOptions(model=plain_folder, draft_model=plain_folder, device="cpu")
    small = load_writer(options).draft_model
    assert small is not None
    assert any(map(is_packed_in_place, small.modules())) == packs_here()


@pytest.mark.parametrize(
    ("command", "packs"),
    [
        *((name, True) for name in ("chat", "batch {input} {output}", "serve")),
        *((f"serve {more}", "eager" not in more) for more in ("--forward eager", "--budget fixed")),
        ("check", False),
    ],
)
def test_which_commands_pack(command, packs, chat_folder, tmp_path, monkeypatch):
    asked = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(writer_module, "load_model", asked)
    files = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl"}
    files["input"].write_text('{"prompt": "the fox"}\n')
    name, *more = command.format(**files).split()
    with pytest.raises(KeyboardInterrupt):
        app([name, chat_folder, *more], result_action="return_value")
    assert asked.call_args.kwargs.get("packs", False) == packs


def test_files_of_a_folder(tmp_path):
    (tmp_path / "there").write_text("x")
    assert find_file(str(tmp_path), "there") == tmp_path / "there"
    assert find_file(str(tmp_path), "missing") is None
    assert find_file("not a name of anything", "missing") is None


@pytest.mark.parametrize("name", ["/nowhere/at all", "a/b/c", "", "two words"])
def test_what_has_no_form_of_a_name_is_refused(name, tmp_path):
    for wrong in (name, str(tmp_path)):
        with pytest.raises(ConfigError, match=r"MODEL must be a folder with a config\.json"):
            check_model_name(wrong, "MODEL")
    (tmp_path / "adapter_config.json").touch()
    check_model_name(str(tmp_path), "MODEL")
    check_model_name("owner/model", "MODEL")


def test_the_hub_is_asked_once_for_a_model_that_is_not_here(plain_folder, monkeypatch):
    names = []

    def model_info(name, **_options):
        names.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    told = r"'owner/nothing', which is no folder.*asked: no network"
    with pytest.raises(CliError, match=rf"MODEL must.*{told}"):
        load_tokenizer(ModelOptions(model="owner/nothing"))
    with pytest.raises(CliError, match=rf"--draft-model must.*{told}"):
        load_writer(WriteOptions(model=plain_folder, draft_model="owner/nothing"))
    assert names == ["owner/nothing"] * 2

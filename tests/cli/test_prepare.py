"""`selfspec prepare`: a model's folder with which programs draft that know nothing of selfspec."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from selfspec import attach, detach
from selfspec.cache import save_cache, tokenizer_info
from tests.caches import contents

TEXT = "the quick brown fox jumps over the lazy dog\nthe quick"


@pytest.fixture
def folder(chat_folder, tmp_path, monkeypatch) -> Path:
    """A copy of a model's folder. transformers copies the code of models to another folder."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code")
    )
    return Path(shutil.copytree(chat_folder, tmp_path / "model"))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def spec_of(model):
    return vars(model)["_selfspec_attachment"].spec


def test_a_model_from_the_folder_drafts_and_writes_the_same_text(run, folder):
    plain, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    inputs = tokenizer(TEXT, return_tensors="pt")
    expected = plain.generate(**inputs, max_new_tokens=24)
    result = run("prepare", folder)
    assert result.exit_code == 0
    assert "--trust-remote-code" in result.stdout
    model = load(folder)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, max_new_tokens=24), expected)
    assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=24), expected)
    assert spec_of(model).total_stats.num_calls == 3
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=24, num_beams=2),
        plain.generate(**inputs, max_new_tokens=24, num_beams=2),
    )
    written = pipeline("text-generation", model=load(folder), tokenizer=tokenizer)
    options = {"max_new_tokens": 24, "return_full_text": False, "do_sample": False}
    assert written(TEXT, **options) == pipeline(
        "text-generation", model=plain, tokenizer=tokenizer
    )(TEXT, **options)
    assert spec_of(written.model).stats.num_steps


def test_the_cache_beside_the_weights_is_known_at_once(run, folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = contents(tokenizer=tokenizer_info(tokenizer))
    save_cache(tmp_path / "mine", known)
    assert run("prepare", folder, "--cache", tmp_path / "mine").exit_code == 0
    model = load(folder)
    model.generate(**tokenizer(TEXT, return_tensors="pt"), max_new_tokens=2)
    assert spec_of(model).stats.table_bytes


def test_one_who_attaches_the_model_has_its_own_assistant(run, folder):
    run("prepare", folder)
    model = attach(load(folder))
    inputs = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=4)
    assert spec_of(model) is None
    detach(model)
    model.generate(**inputs, max_new_tokens=4)
    assert "generate" not in vars(model)


def test_what_is_no_model_and_what_is_there_already_is_refused(run, folder, tmp_path):
    assert "must hold a model" in run("prepare", tmp_path).stderr
    run("prepare", folder)
    again = run("prepare", folder)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert run("prepare", folder, "--overwrite").exit_code == 0

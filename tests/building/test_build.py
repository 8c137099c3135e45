"""A whole build, from texts and from what the model says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from selfspec import SelfSpec
from selfspec.building import build as build_module
from selfspec.building.reading import teach
from selfspec.building.recipe import Recipe, read_recipe
from selfspec.cache import load_cache
from selfspec.errors import BuildError
from selfspec.forward.model import vocab_size
from selfspec.learning import top_k_of

VOCABULARY = {"data": "vocabulary", "build": "lut", "batch": 7, "warmup_tokens": 0}


class TestTexts:
    def test_a_cache_of_both_kinds(self, tmp_path, build, lines, texts, tokenizer):
        build(tmp_path / "cache", data=str(lines), form="paragraph", licence="CC0")
        held = load_cache(tmp_path / "cache")
        ids = [tokenizer(text)["input_ids"] for text in texts]
        assert held.answers.tolist() == [token for text in ids for token in (*text, -1)]
        assert set(held.tables) == {"lut", "lut2"}
        tokens = sum(map(len, ids))
        about = held.about
        assert (about["documents"], about["tokens"], about["tokens_read"]) == (9, tokens, tokens)
        assert (about["name"], about["licence"], about["left_out"]) == ("tiny", "CC0", 0)
        assert about["recipe"]["data"] == lines.name
        assert str(tmp_path) not in json.dumps(about)

    def test_texts_need_no_model(self, tmp_path, build, lines, model, monkeypatch):
        monkeypatch.setattr(type(model), "forward", None)
        contents = build(tmp_path / "cache", data=str(lines), form="paragraph", build="texts")
        assert contents.tables == {}
        assert "model" not in contents.about

    def test_a_cache_of_the_vocabulary(self, tmp_path, build, tokenizer, model):
        """What the model says behind each token, as in an answer."""
        tables = build(tmp_path / "cache", **VOCABULARY).tables
        assert len(tables["lut2"]["ids"]) == 0, "no pair was read"
        size = len(tokenizer)
        assert tables["lut"]["tokens"].tolist() == list(range(size))
        hello = [{"role": "user", "content": "Hello"}]
        text = tokenizer.apply_chat_template(hello, tokenize=False, add_generation_prompt=True)
        prefix = tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in (0, 5, size - 1):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prefix, token]])).logits[0, -1]
            assert tables["lut"]["ids"][token].tolist() == logits.topk(8).indices.tolist()
        few = build(tmp_path / "few", **{**VOCABULARY, "warmup_tokens": 14})
        assert few.tables["lut"]["tokens"].tolist() == list(range(14))

    def test_the_luts_hold_what_the_model_says(self, model):
        """Each window alone, in order, gives the same."""
        documents = [np.arange(5, 12), None, np.array([20, 5, 6]), np.arange(30, 45)]
        memory, expected = (SelfSpec().learned(vocab_size(model)) for _ in range(2))
        recipe = Recipe.of(data="d", window=4, batch=2)
        assert sum(teach(memory, model, documents, recipe, prefix=[])) == 25
        for ids in (each for each in documents if each is not None):
            for start in range(0, len(ids), 4):
                window = ids[start : start + 4].tolist()
                with torch.inference_mode():
                    logits = model(torch.tensor([window])).logits[0]
                pairs = list(zip([-1, *window], window, strict=False))
                expected.observe_pairs(np.array(pairs), top_k_of(logits, memory.top_k))
        for source, key in (("lut", "tokens"), ("lut2", "pairs")):
            ours, theirs = memory.tables()[source], expected.tables()[source]
            assert np.array_equal(ours[key], theirs[key])
            assert np.array_equal(ours["ids"], theirs["ids"])
            assert np.allclose(ours["probabilities"], theirs["probabilities"], atol=2e-3)

    @pytest.mark.parametrize("build_what", ["both", "lut", "texts"])
    def test_data_with_nothing_in_it(self, tmp_path, build, build_what):
        path = tmp_path / "empty.txt"
        path.write_text("")
        with pytest.raises(BuildError, match="--data must hold a document with text in it"):
            build(tmp_path / "cache", data=str(path), build=build_what)
        assert list(tmp_path.iterdir()) == [path]


def test_as_many_texts_are_kept_as_a_selfspec_drafts_from(tmp_path, build, lines, monkeypatch):
    monkeypatch.setattr(build_module, "MAX_TOKENS", 30)
    contents = build(tmp_path / "cache", data=str(lines), form="paragraph", build="texts")
    assert len(contents.answers) == 30
    assert contents.answers[-1] == -1  # What is put after it is another text.
    assert contents.about["documents"] < 9


def test_the_answers_of_a_batch_by_their_ids(tmp_path, build, tokenizer, loads_datasets):
    ids = [tokenizer(f"say {number} and {number}")["input_ids"] for number in range(4)]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "ids": each}) + "\n" for each in ids))
    keys = {**read_recipe("own-answers"), "data": str(path)}
    contents = build(tmp_path / "cache", **keys)
    assert contents.answers.tolist() == [token for text in ids for token in (*text, -1)]
    assert len(contents.tables["lut"]["tokens"])
    assert contents.about["documents"] == 4

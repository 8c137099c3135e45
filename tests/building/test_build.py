"""A whole build, from texts and from what the model says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from selfspec.building.grams import GramCounter
from selfspec.building.merging import merged
from selfspec.cache import load_cache
from selfspec.errors import BuildError, CacheError
from tests.building.test_counting_grams import assert_tables

VOCABULARY = {"data": "vocabulary", "build": "lut", "batch": 7, "warmup_tokens": 0}


def test_a_cache_of_both_kinds(tmp_path, build, lines, texts, tokenizer):
    build(tmp_path / "cache", data=str(lines), form="paragraph", licence="CC0")
    held = load_cache(tmp_path / "cache")
    counter = GramCounter(vocab_size=len(tokenizer))
    for text in texts:
        counter.add(tokenizer(text)["input_ids"])
    assert_tables(held.corpus, counter.tables().arrays())
    assert set(held.tables) == {"lut", "lut2"}
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    about = held.about
    assert (about["documents"], about["tokens"], about["tokens_read"]) == (9, tokens, tokens)
    assert (about["name"], about["licence"], about["left_out"]) == ("tiny", "CC0", 0)
    assert about["recipe"]["data"] == lines.name
    assert str(tmp_path) not in json.dumps(about)


def test_counting_needs_no_model(tmp_path, build, lines, model, monkeypatch):
    monkeypatch.setattr(type(model), "forward", None)
    contents = build(tmp_path / "cache", data=str(lines), form="paragraph", build="ngrams")
    assert contents.tables == {}
    assert "model" not in contents.about


def test_a_cache_of_the_vocabulary(tmp_path, build, tokenizer, model):
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


def test_a_cache_that_is_there_stays_unless_asked(tmp_path, build, lines):
    keys = {"data": str(lines), "form": "paragraph", "build": "ngrams"}
    build(tmp_path / "cache", **keys)
    with pytest.raises(CacheError):
        build(tmp_path / "cache", **keys, min_count=3)
    build(tmp_path / "cache", overwrite=True, **keys, min_count=3)
    assert load_cache(tmp_path / "cache").about["recipe"]["min_count"] == 3


@pytest.mark.parametrize("keys", [{}, {"build": "lut"}, {"learn_from": "generations"}])
def test_data_with_nothing_in_it(tmp_path, build, keys):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(BuildError, match="--data must hold a "):
        build(tmp_path / "cache", data=str(tmp_path / "empty.txt"), **keys)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_prompts_need_a_template(tmp_path, build, prompts, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    keys = {"data": str(prompts), "column": "prompt", "learn_from": "generations"}
    with pytest.raises(BuildError, match="pass --no-chat-template"):
        build(tmp_path / "cache", **keys)
    about = build(tmp_path / "cache", **keys, chat_template=False, max_new_tokens=4).about
    assert about["answers"] == 4


def test_tokens_that_the_tokenizer_lacks(tmp_path, build, loads_datasets):
    (tmp_path / "ids.jsonl").write_text('{"ids": [1, 99999]}\n')
    with pytest.raises(BuildError, match=r"the tokens of --data .* \(got 99999\)"):
        build(tmp_path / "cache", data=str(tmp_path / "ids.jsonl"), column="ids", build="ngrams")


def test_parts_that_are_missing_merge_to_nothing(tmp_path, build, lines):
    keys = {"data": str(lines), "form": "paragraph"}
    lut, ngrams = (build(tmp_path / kind, build=kind, **keys) for kind in ("lut", "ngrams"))
    both = merged([lut, ngrams])
    assert_tables(both.corpus, ngrams.corpus.arrays())
    assert np.array_equal(both.tables["lut2"]["ids"], lut.tables["lut2"]["ids"])
    assert both.calibration is None

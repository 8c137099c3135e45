"""A cache that needs no data: what the model says behind each token of its own vocabulary."""

from __future__ import annotations

import pytest
import torch

from selfspec.building.recipe import Recipe
from selfspec.building.tokens import each_token, prefix_of
from selfspec.cache import load_cache
from selfspec.errors import BuildError

KEYS = {"data": "vocabulary", "build": "lut", "window": 1, "batch": 7, "warmup_tokens": 0}


def test_each_token_comes_once_and_frequent_ones_first(tokenizer):
    ids = [int(each[0]) for each in each_token(tokenizer)]
    assert ids == list(range(len(tokenizer)))
    assert [int(each[0]) for each in each_token(tokenizer, skip=3)] == ids[3:]


@pytest.mark.parametrize("by_workers", [False, True])
def test_the_table_holds_what_the_model_says_as_in_an_answer(
    tmp_path, build, tokenizer, model, by_workers
):
    build(tmp_path / "cache", by_workers=by_workers, **KEYS)
    held = load_cache(tmp_path / "cache")
    assert held.corpus is None
    tables = held.tables
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
    about = held.about
    assert about["tokens_read"] == size
    assert "--data vocabulary" in about["command"]


def test_the_limit_takes_the_most_frequent(tmp_path, build):
    build(tmp_path / "cache", **{**KEYS, "warmup_tokens": 14})
    assert load_cache(tmp_path / "cache").tables["lut"]["tokens"].tolist() == list(range(14))


def test_without_a_template_a_text_begins(tokenizer, build, tmp_path, monkeypatch):
    plain = Recipe.of(**{"name": "n", **KEYS, "chat_template": False})
    assert prefix_of(plain, tokenizer) == tokenizer("\n")["input_ids"]
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(BuildError, match="chat_template must be false"):
        build(tmp_path / "cache", **KEYS)

"""A whole build, from texts and from what the model says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from selfspec import SelfSpec, building
from selfspec.building import build_cache, teach
from selfspec.errors import BuildError
from selfspec.forward.model import vocab_size
from selfspec.learning import top_k_of

NO_MODEL = None  # Whoever calls it fails.


def test_a_cache_of_texts_and_of_what_the_model_says(tmp_path, folder, texts, tokenizer, model):
    contents = build_cache(str(folder), tokenizer, lambda: model)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert contents.answers.tolist() == [token for text in ids for token in (*text, -1)]
    assert set(contents.tables) == {"lut", "lut2"}
    tokens = sum(map(len, ids))
    about = contents.about
    assert (about["documents"], about["tokens"], about["tokens_read"]) == (9, tokens, tokens)
    assert (about["data"], about["left_out"]) == ("texts", 0)
    assert str(tmp_path) not in json.dumps(about)


def test_the_luts_hold_what_the_model_says(model, monkeypatch):
    """Each window alone, in order, gives the same."""
    monkeypatch.setattr(building, "_WINDOW", 4)
    monkeypatch.setattr(building, "_ROWS", 2)
    documents = [np.arange(5, 12), np.array([20, 5, 6]), np.arange(30, 45)]
    memory, expected = (SelfSpec().learned(vocab_size(model)) for _ in range(2))
    assert sum(teach(memory, model, documents)) == 25
    for ids in documents:
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


def test_data_with_nothing_in_it(tmp_path, tokenizer):
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(BuildError, match="--data must hold a document with text in it"):
        build_cache(str(path), tokenizer, NO_MODEL)


def test_as_many_texts_are_kept_as_a_selfspec_drafts_from(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(building, "MAX_TOKENS", 30)
    contents = build_cache(str(folder), tokenizer, NO_MODEL, num_tokens=0)
    assert len(contents.answers) == 30
    assert contents.answers[-1] == -1  # What is put after it is another text.
    assert contents.about["documents"] < 9

"""A whole build from texts."""

from __future__ import annotations

import json

import pytest

from selfspec import building
from selfspec.building import build_cache
from selfspec.errors import BuildError


def test_a_cache_of_texts(tmp_path, build, folder, texts, tokenizer):
    contents = build(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert contents.answers.tolist() == [token for text in ids for token in (*text, -1)]
    assert contents.tables == {}
    tokens = sum(map(len, ids))
    about = contents.about
    assert (about["documents"], about["tokens"]) == (9, tokens)
    assert about["data"] == "texts"
    assert str(tmp_path) not in json.dumps(about)


def test_data_with_nothing_in_it(tmp_path, build, tokenizer):
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(BuildError, match="--data must hold a document with text in it"):
        build_cache(str(path), tokenizer)


def test_as_many_texts_are_kept_as_a_selfspec_drafts_from(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(building, "MAX_TOKENS", 30)
    contents = build_cache(str(folder), tokenizer)
    assert len(contents.answers) == 30
    assert contents.answers[-1] == -1  # What is put after it is another text.
    assert contents.about["documents"] < 9

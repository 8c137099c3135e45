"""What is saved is what is loaded, from the same bytes each time; large files through a map."""

import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load_file

from selfspec import CacheCardError, CacheFormatError, CacheTokenizerError
from selfspec.store import (
    CacheContents,
    TokenizerInfo,
    load_cache,
    save_cache,
    tensors,
    tokenizer_info,
    verify_cache,
)
from tests.caches import (
    FILES,
    OWNER,
    TEXT,
    FakeTokenizer,
    any_contents,
    contents,
    count_grams,
    lut,
    plain,
)


@given(any_contents)
@settings(max_examples=60, deadline=None)
def test_whatever_is_saved_is_loaded(held):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "cache"
        save_cache(folder, held)
        loaded = load_cache(folder)
        assert plain(loaded) == plain(held)
        assert loaded.num_ids == held.count_ids()
        assert verify_cache(folder).ok


def test_the_same_contents_give_the_same_bytes(folder, tmp_path):
    save_cache(tmp_path / "again", load_cache(folder))
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(["cache.json", *FILES])
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_other_programs_can_read_the_tables(folder):
    arrays = load_file(folder / "corpus.safetensors")
    assert set(arrays) == set(count_grams(TEXT).arrays())
    np.testing.assert_array_equal(load_file(folder / "lut.safetensors")["lut.ids"], lut()["ids"])


def test_the_card_says_what_is_in_it(folder):
    card = json.loads((folder / "cache.json").read_text())
    assert card["kinds"] == ["calibration", "corpus", "fitted", "lut"]
    assert card["counts"] == {
        "calibration": 2,
        "continuations": 23,
        "fitted_nodes": 4,
        "lut": 3,
        "lut2": 2,
        "prefixes": 18,
    }
    assert (card["top_k"], card["max_prefix"], card["num_ids"]) == (4, 2, 12)
    assert card["tokenizer"] == vars(OWNER)
    assert card["about"]["corpus"] == "digits of π"
    for name in FILES:
        assert card["files"][name]["size"] == (folder / name).stat().st_size


def test_a_live_cache_may_be_cut_off(folder):
    """As a map of the file, reading it would end this process."""
    loaded = load_cache(folder)
    for path in folder.iterdir():
        os.truncate(path, 0)
    assert plain(loaded) == plain(contents())


def test_arrays_of_a_large_file_are_views_and_read_only(folder, monkeypatch):
    monkeypatch.setattr(tensors, "_LARGE", 8)
    loaded = load_cache(folder)
    arrays = [*loaded.corpus.arrays().values(), *loaded.tables["lut"].values()]
    assert all(isinstance(array, np.memmap) and not array.flags.writeable for array in arrays)
    maps = Path("/proc/self/maps")
    if maps.exists():
        name = str(folder / "corpus.safetensors")
        lines = [line for line in maps.read_text().splitlines() if line.endswith(name)]
        assert len(lines) == 1  # for all arrays
        assert lines[0].split()[1].startswith("r--s")  # shared


def test_an_empty_cache_is_a_card_alone(tmp_path):
    save_cache(tmp_path / "cache", CacheContents(tokenizer=OWNER))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["cache.json"]
    assert plain(load_cache(tmp_path / "cache")) == (OWNER, {}, None, None, None, {})
    assert load_cache(tmp_path / "cache").num_ids == 0


def test_about_may_hold_dictionaries_of_any_kind(tmp_path):
    save_cache(tmp_path / "cache", contents(about={"words": Counter("aab")}))
    assert load_cache(tmp_path / "cache").about == {"words": {"a": 2, "b": 1}}


@pytest.mark.parametrize("about", [{"when": {1, 2}}, {"share": float("nan")}])
def test_about_must_be_json(tmp_path, about):
    with pytest.raises(CacheCardError, match="about must be what JSON can say"):
        save_cache(tmp_path / "cache", contents(about=about))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"lutt": lut()}, "one of lut, lut2"),
        ({"lut": {**lut(), "more": lut()["ids"]}}, "must have tokens, ids, probabilities"),
        ({"lut": {**lut(), "tokens": np.arange(3)}}, "int32"),
        ({"lut": {**lut(), "tokens": lut()["tokens"][:2]}}, "one key a row"),
        ({"lut": {**lut(), "ids": lut()["ids"][:, :2]}}, "equal rows"),
    ],
)
def test_tables_that_can_not_be_loaded_are_not_saved(tmp_path, tables, said):
    with pytest.raises(CacheFormatError, match=said):
        save_cache(tmp_path / "cache", contents(tables=tables))
    assert list(tmp_path.iterdir()) == []


class TestTokenizer:
    def test_its_vocabulary_is_its_fingerprint(self):
        one, same = tokenizer_info(FakeTokenizer()), tokenizer_info(FakeTokenizer(name="other/one"))
        assert one.fingerprint == same.fingerprint
        assert one.vocab_size == 50
        assert tokenizer_info(one) is one

    def test_any_other_token_is_another_tokenizer(self):
        other = FakeTokenizer()
        other.vocab["token 7"], other.vocab["token 8"] = 8, 7
        fingerprints = {
            tokenizer_info(each).fingerprint for each in (FakeTokenizer(), FakeTokenizer(51), other)
        }
        assert len(fingerprints) == 3

    def test_the_order_of_its_dictionary_is_nothing(self):
        turned = FakeTokenizer()
        turned.vocab = dict(reversed(turned.vocab.items()))
        assert tokenizer_info(turned) == tokenizer_info(FakeTokenizer())

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("owner/name", "owner/name"),
            ("gpt2", "gpt2"),
            ("/home/me/models/mine", "mine"),
            ("~/mine", "mine"),
            ("C:\\models\\mine", "mine"),
            ("a/b/c", "c"),
        ],
    )
    def test_paths_are_nobodys_business(self, name, short):
        assert tokenizer_info(FakeTokenizer(name=name)).name == short

    def test_what_has_no_vocabulary_is_none(self):
        with pytest.raises(CacheTokenizerError, match="must have a get_vocab"):
            tokenizer_info("gpt2")

    def test_a_cache_of_another_one_is_refused(self, folder):
        with pytest.raises(
            CacheTokenizerError,
            match=r"was built for tokenizer 5a5a5a5a… \(owner/toy\), this model uses [0-9a-f]{8}… ",
        ):
            load_cache(folder, tokenizer=FakeTokenizer())
        info = TokenizerInfo(OWNER.fingerprint, "renamed", 99)
        assert load_cache(folder, tokenizer=info).tokenizer == OWNER

"""`SelfSpec(remember=...)`: what one learned the next one knows, and nothing is kept unasked."""

import gc
import logging
import os
import threading

import numpy as np
import pytest

from selfspec import CacheError, CacheTokenizerError, ConfigError, SelfSpec, VocabularyError
from selfspec.plugin import remember as remember_module
from selfspec.records import TopK
from selfspec.store import load_cache, save_cache, saving, tokenizer_info
from tests.caches import FakeTokenizer, contents, count_grams, lut
from tests.fakes import VOCAB, attached_model, lut_of, prompt

TOKENIZER = FakeTokenizer(VOCAB)


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mine"


def test_a_folder_that_can_not_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="remember must be a folder that can be written"):
        SelfSpec(remember=tmp_path / "file" / "below")
    SelfSpec(remember=tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()


def write(spec, seed=1):
    inputs = prompt(seed=seed)
    return attached_model().generate(**inputs, assistant=spec, max_new_tokens=24).tolist()


def learned(path, seed=1, **knobs) -> SelfSpec:
    """One that has answered and saved."""
    spec = SelfSpec(remember=path, max_nodes=8, **knobs)
    write(spec, seed)
    spec.save_memory()
    return spec


def tokens_kept(path) -> list[int]:
    return load_cache(path / "memory").tables["lut"]["tokens"].tolist()


def test_the_next_one_knows_what_the_last_one_learned(path):
    first = learned(path)
    second = SelfSpec(remember=path, max_nodes=8)
    ours, theirs = second.memory(VOCAB), first.memory(VOCAB)
    assert ours.calibration.rows() == theirs.calibration.rows()
    for source, arrays in theirs.tables().items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(ours.tables()[source][name], array)


def test_nothing_is_kept_unasked(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remember_module, "SAVE_SECONDS", 0.0)
    spec = SelfSpec()
    write(spec)
    del spec
    assert os.listdir(tmp_path) == []


def test_nothing_is_saved_before_minutes_have_passed(path, monkeypatch):
    spec = SelfSpec(remember=path)
    write(spec)
    assert not path.exists()
    monkeypatch.setattr(remember_module, "SAVE_SECONDS", 0.0)
    write(spec)
    assert tokens_kept(path) == lut_of(spec).arrays()["tokens"].tolist()


def test_one_that_goes_saves_first(path):
    spec = SelfSpec(remember=path)
    write(spec)
    tokens = lut_of(spec).arrays()["tokens"].tolist()
    del spec
    gc.collect()
    assert tokens_kept(path) == tokens


def test_nothing_new_is_not_written(path):
    learned(path)
    before = (path / "memory").stat()
    spec = SelfSpec(remember=path)
    spec.memory(VOCAB)
    spec.save_memory()
    assert (path / "memory").stat().st_ino == before.st_ino


@pytest.mark.parametrize("learning", ["frozen", "request"])
def test_other_scopes_read_and_save_nothing(path, learning):
    learned(path)
    kept = tokens_kept(path)
    spec = SelfSpec(remember=path, learning=learning)
    assert lut_of(spec).arrays()["tokens"].tolist() == kept
    write(spec, seed=5)
    spec.save_memory()
    assert tokens_kept(path) == kept


def test_two_at_once_lose_nothing(path):
    """Both opened it when it was empty."""
    one, other = (SelfSpec(remember=path, max_nodes=8) for _ in range(2))
    for spec, seed in ((one, 1), (other, 2)):
        write(spec, seed)
    for spec in (one, other, one):
        spec.save_memory()
    both = {*lut_of(one).arrays()["tokens"], *lut_of(other).arrays()["tokens"]}
    assert set(tokens_kept(path)) == both
    trials = sum(row[2] for row in load_cache(path / "memory").calibration)
    each = [sum(row[2] for row in s.memory(VOCAB).calibration.rows(None)) for s in (one, other)]
    assert trials == pytest.approx(sum(each))


def test_what_was_opened_counts_once(path):
    learned(path)
    before = load_cache(path / "memory").calibration
    learned(path, seed=2)
    third = SelfSpec(remember=path, max_nodes=8)
    write(third, seed=3)
    third.save_memory()
    assert load_cache(path / "memory").calibration == third.memory(VOCAB).calibration.rows()
    assert load_cache(path / "memory").calibration != before


def test_threads_save_while_others_learn(path, monkeypatch):
    monkeypatch.setattr(remember_module, "SAVE_SECONDS", 0.0)
    spec = SelfSpec(remember=path, max_nodes=8)
    threads = [threading.Thread(target=write, args=(spec, seed)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spec.save_memory()
    assert tokens_kept(path) == lut_of(spec).arrays()["tokens"].tolist()


class TestOwner:
    def test_another_tokenizer_is_refused_when_made(self, path):
        learned(path, tokenizer=TOKENIZER)
        with pytest.raises(CacheTokenizerError, match="name another folder for each tokenizer"):
            SelfSpec(remember=path, tokenizer=FakeTokenizer(VOCAB - 1))
        SelfSpec(remember=path, tokenizer=TOKENIZER).memory(VOCAB)

    def test_another_vocabulary_is_refused_at_the_first_call(self, path):
        learned(path)
        spec = SelfSpec(remember=path)
        with pytest.raises(CacheTokenizerError, match=r"this model uses .*vocabulary of 7 tokens"):
            spec.memory(7)
        spec.memory(VOCAB)

    def test_without_a_tokenizer_the_size_decides(self, path):
        learned(path, tokenizer=TOKENIZER)
        SelfSpec(remember=path).memory(VOCAB)
        with pytest.raises(CacheTokenizerError):
            SelfSpec(remember=path).memory(VOCAB + 64)
        SelfSpec(remember=path, tokenizer=TOKENIZER).memory(VOCAB + 64)
        with pytest.raises(VocabularyError):
            SelfSpec(remember=path, tokenizer=TOKENIZER).memory(VOCAB // 2)

    def test_a_folder_takes_the_first_tokenizer_that_is_named(self, path):
        learned(path)
        learned(path, seed=2, tokenizer=TOKENIZER)
        assert load_cache(path / "memory").tokenizer == tokenizer_info(TOKENIZER)
        learned(path, seed=3)
        assert load_cache(path / "memory").tokenizer == tokenizer_info(TOKENIZER)

    def test_a_folder_that_became_anothers_is_not_written(self, path):
        spec = SelfSpec(remember=path, tokenizer=TOKENIZER)
        write(spec)
        learned(path, tokenizer=FakeTokenizer(VOCAB, "owner/same"), seed=2)
        save_cache(path / "memory", contents(corpus=None), overwrite=True)
        with pytest.raises(CacheTokenizerError):
            spec.save_memory()


class TestTrouble:
    def test_a_folder_that_can_not_be_written_is_warned_of_once(self, path, caplog, monkeypatch):
        def refuse(*_args, **_kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(saving, "put_in_place", refuse)
        monkeypatch.setattr(remember_module, "SAVE_SECONDS", 0.0)
        spec = SelfSpec(remember=path)
        with caplog.at_level(logging.WARNING, "selfspec"):
            assert write(spec) == write(None)
            write(spec, seed=2)
        assert caplog.text.count("what was learned is not saved: ") == 1
        assert "Permission denied" in caplog.text
        with pytest.raises(CacheError, match="Permission denied"):
            spec.save_memory()
        monkeypatch.undo()
        spec.save_memory()  # Nothing of it was lost.
        assert tokens_kept(path) == lut_of(spec).arrays()["tokens"].tolist()

    def test_without_a_folder_there_is_nothing_to_save(self):
        with pytest.raises(ConfigError, match=r"save_memory\(\) needs a folder"):
            SelfSpec().save_memory()


class TestTogether:
    """With a cache: it comes first, and what is remembered goes on top."""

    @pytest.fixture
    def cache(self, tmp_path):
        tables = {"lut": lut([1, 3, 9])}
        held = contents(
            tokenizer=tokenizer_info(TOKENIZER),
            tables=tables,
            corpus=count_grams([5, 6, 7] * 4),
            calibration=None,
        )
        save_cache(tmp_path / "cache", held)
        return tmp_path / "cache"

    def test_rows_of_the_memory_win(self, cache, path):
        first = learned(path, tokenizer=TOKENIZER)
        spec = SelfSpec.from_pretrained(cache, remember=path)
        arrays, ours = lut_of(spec).arrays(), lut_of(first).arrays()
        assert set(arrays["tokens"]) == {1, 3, 9, *ours["tokens"]}
        found = np.searchsorted(arrays["tokens"], ours["tokens"])
        np.testing.assert_array_equal(arrays["ids"][found], ours["ids"])

    def test_only_what_was_learned_is_kept(self, cache, path):
        spec = SelfSpec.from_pretrained(cache, remember=path)
        top = TopK(np.full((1, 8), 5, np.int32), np.full((1, 8), 0.1, np.float16))
        lut_of(spec).learn([20], top)
        spec.save_memory()
        held = load_cache(path / "memory")
        assert tokens_kept(path) == [20]
        assert held.corpus is None
        assert held.tokenizer == tokenizer_info(TOKENIZER)


class TestForgetting:
    def test_what_was_not_saved_never_is(self, path):
        learned(path)
        kept = tokens_kept(path)
        spec = SelfSpec(remember=path)
        write(spec, seed=5)
        spec.forget()
        spec.save_memory()
        del spec
        gc.collect()
        assert tokens_kept(path) == kept

    def test_the_next_call_opens_the_folder_again(self, path):
        learned(path)
        kept = tokens_kept(path)
        spec = SelfSpec(remember=path)
        write(spec, seed=5)
        spec.forget()
        assert lut_of(spec).arrays()["tokens"].tolist() == kept
        write(spec, seed=6)
        spec.save_memory()
        assert set(tokens_kept(path)) > set(kept)

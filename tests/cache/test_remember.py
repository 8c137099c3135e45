"""`SelfSpec(remember=...)`: what one learned the next one knows, and nothing is kept unasked."""

import gc
import logging
import multiprocessing
import os
import signal

import filelock
import numpy as np
import pytest

from selfspec import CacheError, ConfigError, SelfSpec, VocabularyError
from selfspec.cache import CacheContents, load_cache, memory_loader, save_cache, tokenizer_info
from selfspec.cache import remember as remember_module
from tests.caches import (
    OWNER,
    FakeTokenizer,
    add_rows,
    die_while_saving,
    learn,
    lut,
    lut2,
    remembering,
)
from tests.fakes import VOCAB, attached_model, lut_of, prompt
from tests.lossless.same import in_threads

TOKENIZER = FakeTokenizer(VOCAB)
SPAWN = multiprocessing.get_context("spawn")
KIND = [["lut", 0, 1, 0, 1]]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mine"


@pytest.fixture
def always(monkeypatch) -> None:
    """Saves after every call."""
    monkeypatch.setattr(memory_loader, "SAVE_SECONDS", 0.0)


def new_spec(path, **knobs) -> SelfSpec:
    return SelfSpec(remember=path, tokenizer=TOKENIZER, max_nodes=8, **knobs)


def write(spec, seed=1):
    inputs = prompt(seed=seed)
    return attached_model().generate(**inputs, assistant=spec, max_new_tokens=24).tolist()


def learned(path, seed=1, **knobs) -> SelfSpec:
    """One that has answered and saved."""
    spec = new_spec(path, **knobs)
    write(spec, seed)
    spec.save_learned()
    return spec


def tokens_kept(path) -> list[int]:
    return load_cache(path).tables["lut"]["tokens"].tolist()


def tokens_of(spec) -> list[int]:
    return lut_of(spec).arrays()["tokens"].tolist()


def kept(**changes) -> CacheContents:
    return CacheContents(**{"tokenizer": OWNER, "tables": {"lut": lut()}, **changes})


def test_the_next_one_knows_what_the_last_one_learned_by_its_end(path):
    first = new_spec(path)
    write(first)
    theirs = first.learned(VOCAB)
    del first
    gc.collect()
    ours = new_spec(path).learned(VOCAB)
    assert ours.calibration.rows() == theirs.calibration.rows()
    for source, arrays in theirs.tables().items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(ours.tables()[source][name], array)


def test_nothing_is_kept_unasked_or_before_minutes_have_passed(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specs = SelfSpec(), new_spec(path)
    for spec in specs:
        write(spec)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(memory_loader, "SAVE_SECONDS", 0.0)
    for spec in specs:
        write(spec)
    assert tokens_kept(path) == tokens_of(specs[1])
    # Only the owner can read it.
    assert {(each.name, each.stat().st_mode & 0o777) for each in tmp_path.iterdir()} == {
        ("mine.safetensors", 0o600),
        ("mine.safetensors.lock", 0o600),
    }
    with pytest.raises(ConfigError, match="save_learned"):
        SelfSpec().save_learned()


def test_a_cache_without_rows_is_remembered(path):
    """Such as that of a `SelfSpec` that never learned."""
    spec = SelfSpec(learning="frozen")
    write(spec)
    spec.save_pretrained(path, tokenizer=TOKENIZER)
    assert write(new_spec(path)) == write(None)


def test_models_that_pad_their_vocabulary_differently_share_a_file(path, always):
    """The smaller one leaves out the ids that it does not have, and they stay in the file."""
    high = np.array([VOCAB + 9], np.int32)
    rows = {name: lut([2, 4, VOCAB + 9])[name] for name in ("tokens", "probabilities")}
    ids = np.array([[7, 8, VOCAB + 9, 3], [VOCAB + 9, 5, 6, 1], [1, 2, 3, 4]], np.int32)
    pairs = {**lut2([(VOCAB + 9, 2), (3, 4)]), "ids": ids[:2]}
    owner = tokenizer_info(TOKENIZER)
    tables = {"lut": {**rows, "ids": ids}, "lut2": pairs}
    answers = np.array([3, 4, *high, 5, -1], np.int32)
    save_cache(path, kept(tokenizer=owner, tables=tables, answers=answers))
    spec = new_spec(path)
    assert [token for token, _ in lut_of(spec).next_tokens((0, 2))] == [7, 8, 3]
    assert [token for token, _ in lut_of(spec).next_tokens((0, 4))] == [5, 6, 1]
    write(spec)
    assert high[0] in tokens_kept(path)
    assert high[0] in load_cache(path).answers


@pytest.mark.parametrize("learning", ["frozen", "request"])
def test_other_scopes_read_and_save_nothing(path, learning):
    learned(path)
    known = tokens_kept(path)
    spec = new_spec(path, learning=learning)
    assert tokens_of(spec) == known
    write(spec, seed=5)
    spec.save_learned()
    assert tokens_kept(path) == known


def test_threads_save_while_others_learn(path, always):
    spec = new_spec(path)
    in_threads(lambda seed: write(spec, seed), 4, 4)
    spec.save_learned()
    assert tokens_kept(path) == tokens_of(spec)


class TestRefused:
    """Before any work, in the constructor."""

    def test_no_tokenizer_or_another(self, path):
        learned(path)
        with pytest.raises(ConfigError, match="tokenizer="):
            SelfSpec(remember=path)
        with pytest.raises(CacheError, match="tokenizer"):
            SelfSpec(remember=path, tokenizer=FakeTokenizer(VOCAB - 1))

    def test_what_is_no_memory(self, path, tmp_path):
        learned(path)
        os.truncate(tmp_path / "mine.safetensors", 99)
        with pytest.raises(CacheError, match="can't be read"):
            new_spec(path)
        with pytest.raises(CacheError, match="folder"):
            new_spec(tmp_path / "mine.safetensors" / "below")


class TestOver:
    """What is new goes over what is kept."""

    def test_the_newer_row_wins_and_all_others_stay(self, path):
        save_cache(path, kept())
        on_demand = remembering(path)
        learn(on_demand, [3, 5])
        save_cache(path, kept(tables={"lut": lut([1, 7]), "lut2": lut2()}), overwrite=True)
        on_demand.save()
        tables = load_cache(path).tables
        assert tables["lut"]["tokens"].tolist() == [1, 3, 5, 7, 9]
        assert tables["lut"]["ids"][1].tolist() == [5] * 8
        assert tables["lut"]["ids"][3].tolist() == [*lut([1, 7])["ids"][1].tolist(), *[-1] * 4]
        assert tables["lut2"]["pairs"].tolist() == lut2()["pairs"].tolist()

    def test_of_a_row_that_two_have_the_one_that_is_saved_later_stays(self, path):
        one, other = remembering(path), remembering(path)
        for on_demand, tokens, id_ in ((one, [1, 3], 6), (other, [3, 9], 7)):
            learn(on_demand, tokens, id_)
            on_demand.save()
        ids = load_cache(path).tables["lut"]["ids"]
        assert [row[0] for row in ids.tolist()] == [6, 7, 7]

    @pytest.mark.parametrize(("ours", "theirs", "stays"), [(9, 8, 9), (8, 9, 9), (8, 8, 8)])
    def test_of_two_rates_the_one_with_more_trials_stays(self, path, ours, theirs, stays):
        on_demand = remembering(path)
        on_demand.of(50).calibration.restore([[KIND, 2.0, float(ours)]])
        save_cache(path, kept(calibration=[[KIND, 1.0, float(theirs)]]))
        on_demand.save()
        [(_, hits, trials)] = load_cache(path).calibration
        assert (hits, trials) == (2.0 if ours >= theirs else 1.0, stays)


class TestTrouble:
    def test_one_that_can_not_be_written_is_warned_of_once(self, path, caplog, monkeypatch, always):
        def refuse(*_args):
            raise OSError(28, "No space left on device")

        learned(path)
        spec = new_spec(path)
        with caplog.at_level(logging.WARNING, "selfspec"), monkeypatch.context() as patched:
            patched.setattr(os, "replace", refuse)
            assert write(spec, seed=2) == write(None, seed=2)
            write(spec, seed=3)
            with pytest.raises(CacheError, match="No space left on device"):
                spec.save_learned()
        assert caplog.text.count("what was learned is not saved: ") == 1
        spec.save_learned()  # Nothing of it was lost.
        assert set(tokens_kept(path)) >= set(tokens_of(spec))

    def test_what_can_not_be_written_is_refused_when_it_is_named(self, tmp_path):
        with pytest.raises(CacheError, match="must be a file in a folder that exists"):
            new_spec(tmp_path / "mistyped" / "mine")
        with pytest.raises(CacheError, match="in a folder that can be written"):
            new_spec("/proc/mine")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("num_tokens", [VOCAB + 65, 1])
    def test_a_tokenizer_of_another_model_is_refused_at_the_first_call(
        self, path, num_tokens, monkeypatch
    ):
        monkeypatch.setattr(remember_module, "_MOST_PADDING", VOCAB - 2)
        spec = SelfSpec(remember=path, tokenizer=FakeTokenizer(num_tokens))
        with pytest.raises(VocabularyError, match=f"own tokenizer .* the model has {VOCAB}"):
            write(spec)
        del spec
        gc.collect()
        assert not path.with_suffix(".safetensors").exists()

    def test_no_call_waits_for_another_process_that_saves(self, path, tmp_path, caplog, always):
        """Its lock is a matter of later; the text goes on, and nothing is warned of."""
        spec = new_spec(path)
        with (
            caplog.at_level(logging.WARNING, "selfspec"),
            filelock.FileLock(tmp_path / "mine.safetensors.lock"),
        ):
            write(spec)
        assert not path.with_suffix(".safetensors").exists()
        write(spec, seed=2)
        assert tokens_kept(path) == tokens_of(spec)
        assert caplog.text == ""

    def test_a_lock_that_is_held_at_the_end_is_warned_of(self, path, tmp_path, monkeypatch, caplog):
        """There is no later any more."""
        monkeypatch.setattr(memory_loader, "_MAX_WAIT", 1e-3)
        spec = new_spec(path)
        write(spec)
        with (
            caplog.at_level(logging.WARNING, "selfspec"),
            filelock.FileLock(tmp_path / "mine.safetensors.lock"),
        ):
            spec._learned.end()
        assert "what was learned is not saved: " in caplog.text

    @pytest.mark.long
    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_killed_while_saving_loses_nothing(self, path, tmp_path, step):
        save_cache(path, kept())
        process = SPAWN.Process(target=die_while_saving, args=(path, step))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert tokens_kept(path) == [1, 3, 9]
        assert len(list(tmp_path.glob(".*.tmp"))) == 1  # It lies there until the next save.
        add_rows(path, [2])
        assert tokens_kept(path) == [1, 2, 3, 9]
        assert not list(tmp_path.glob(".*.tmp"))

    @pytest.mark.long
    def test_processes_that_save_at_once_lose_nothing(self, path):
        parts = [list(range(start, 48, 3)) for start in range(3)]
        processes = [SPAWN.Process(target=add_rows, args=(path, part)) for part in parts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert tokens_kept(path) == list(range(48))


def test_what_is_remembered_goes_on_top_of_a_cache(path, tmp_path):
    held = kept(tokenizer=tokenizer_info(TOKENIZER))
    save_cache(tmp_path / "cache", held)
    ours = lut_of(learned(path)).arrays()
    arrays = lut_of(SelfSpec.from_pretrained(tmp_path / "cache", remember=path)).arrays()
    assert set(arrays["tokens"]) == {1, 3, 9, *ours["tokens"]}
    found = np.searchsorted(arrays["tokens"], ours["tokens"])
    np.testing.assert_array_equal(arrays["ids"][found], ours["ids"])


def test_what_is_forgotten_before_it_was_saved_never_is(path):
    """The next call opens the file again."""
    learned(path)
    known = tokens_kept(path)
    spec = new_spec(path)
    write(spec, seed=5)
    spec.forget()
    spec.save_learned()
    assert tokens_kept(path) == tokens_of(spec) == known
    write(spec, seed=6)
    spec.save_learned()
    assert set(tokens_kept(path)) > set(known)


def test_whole_answers_come_back_after_a_restart(path):
    """Whatever else drafts, and those of several processes; each answer is kept once."""
    spec = new_spec(path, sources=("answers",), budget="fixed")
    first = write(spec)
    write(spec)
    spec.save_learned()
    other = learned(path, seed=2, sources=("answers",))
    answers = load_cache(path).answers.tolist()
    assert answers.count(-1) == 2
    assert answers[:25] == [*first[0][-24:], -1]
    del spec, other
    again = new_spec(path, sources=("answers",), budget="fixed")
    assert write(again) == first
    assert again.stats.tokens_per_step > 3
    again.forget()
    assert write(again) == first
    assert again.stats.tokens_per_step > 3
    os.remove(path.with_suffix(".safetensors"))
    again.forget()
    write(again)
    assert again.stats.tokens_per_step < 2


def test_what_was_saved_while_it_was_written_gives_way_to_the_whole(path):
    """Another row's end saves, and this text has begun."""
    spec = new_spec(path, sources=("answers",))

    def save_once(record):
        if len(spec.learned(VOCAB).tables()["answers"]["tokens"]) == 9:
            spec.save_learned()
            beginnings.append(load_cache(path).answers.tolist())

    beginnings = []
    with spec.listening(save_once):
        text = write(spec)[0][-24:]
    assert beginnings == [[*text[:8], -1]]
    spec.save_learned()
    assert load_cache(path).answers.tolist() == [*text, -1]


def test_answers_are_joined_without_those_that_begin_others_and_bounded(monkeypatch):
    def joined(*answers):
        return remember_module._joined(*(np.array(each, np.int32) for each in answers)).tolist()

    assert remember_module._joined(None, None) is None
    assert joined([1, 2, -1, 3, -1], [1, 2, -1, 4, -1]) == [3, -1, 1, 2, -1, 4, -1]
    assert joined([1, 2, -1, 3, -1], [1, 2, 4, -1], [1, -1]) == [3, -1, 1, 2, 4, -1]
    assert joined([], [5, -1]) == [5, -1]
    monkeypatch.setattr(remember_module, "MAX_TOKENS", 3)
    assert joined([1, 2, -1, 3, -1], [4, -1]) == [-1, 4, -1]

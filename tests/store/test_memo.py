"""A file is read in full once for each of its states, and the home may be as it likes."""

import os

import pytest

from selfspec.errors import CacheChecksumError
from selfspec.store import files, load_cache, memo, verify_cache
from tests.caches import FILES, age, flip_byte


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the files whose checksum was taken, in order."""
    names = []
    take = files._sha256

    def taken(file):
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        return take(file)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("no way to see which file is open")
    monkeypatch.setattr(files, "_sha256", taken)
    return names


def test_the_second_time_no_file_is_read(folder, read, home):
    age(folder)
    load_cache(folder)
    assert sorted(read) == sorted(FILES)
    load_cache(folder)
    assert sorted(read) == sorted(FILES)
    assert (home / "selfspec" / "verified.json").is_file()


def test_a_file_just_written_is_read_again(folder, read):
    """It could change within one tick of the clock, and nobody would see."""
    load_cache(folder)
    load_cache(folder)
    assert len(read) == 2 * len(FILES)


def test_verify_reads_every_time(folder, read):
    age(folder)
    load_cache(folder)
    verify_cache(folder)
    assert len(read) == 2 * len(FILES)


def test_a_change_is_seen_though_size_and_time_are_the_same(folder):
    age(folder)
    load_cache(folder)
    flip_byte(folder / "corpus.safetensors")
    with pytest.raises(CacheChecksumError):
        load_cache(folder)


def test_a_bad_verdict_is_not_kept(folder, read):
    age(folder)
    flip_byte(folder / "corpus.safetensors")
    for _ in range(2):
        with pytest.raises(CacheChecksumError):
            load_cache(folder)
    assert read.count("corpus.safetensors") == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', "[" * 100_000])
def test_a_damaged_memo_is_none(folder, read, home, text):
    age(folder)
    (home / "selfspec").mkdir()
    (home / "selfspec" / "verified.json").write_text(text)
    load_cache(folder)
    load_cache(folder)
    assert len(read) == len(FILES)


def test_a_home_that_can_not_be_written(folder, read, home):
    age(folder)
    (home / "selfspec").write_text("a file where a folder should be")
    load_cache(folder)
    load_cache(folder)
    assert len(read) == 2 * len(FILES)


def test_no_home_at_all(folder, read, monkeypatch):
    monkeypatch.setattr(memo, "user_folder", lambda: None)
    assert memo.memo_path() is None
    age(folder)
    load_cache(folder)
    assert len(read) == len(FILES)


def test_old_entries_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(memo, "_MAX_ENTRIES", 2)
    path = tmp_path / "verified.json"
    (tmp_path / "file").write_text("text")
    age(tmp_path)
    stat = (tmp_path / "file").stat()
    for name in ("first", "second", "third"):
        memo.Memo(path).remember(name, stat, "5a")
    known = memo.Memo(path)
    assert [known.knows(n, stat, "5a") for n in ("first", "second", "third")] == [False, True, True]
    assert not known.knows("third", stat, "5b")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []

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


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("again", [load_cache, verify_cache])
def test_the_second_time_no_file_is_read(folder, read, home, is_old, again):
    """Unless it was just written: it could change within one tick of the clock."""
    if is_old:
        age(folder)
    load_cache(folder)
    assert sorted(read) == sorted(FILES)
    again(folder)
    is_read_again = not is_old or again is verify_cache
    assert sorted(read) == sorted(FILES * (1 + is_read_again))
    assert (home / "selfspec" / "verified.json").is_file() == is_old


def test_a_change_is_seen_though_size_and_time_are_the_same(folder, read):
    """And a bad verdict is not kept."""
    age(folder)
    load_cache(folder)
    flip_byte(folder / "corpus.safetensors")
    for _ in range(2):
        with pytest.raises(CacheChecksumError):
            load_cache(folder)
    assert read.count("corpus.safetensors") == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', "[" * 100_000])
def test_a_damaged_memo_is_none(folder, read, home, text):
    age(folder)
    (home / "selfspec").mkdir()
    (home / "selfspec" / "verified.json").write_text(text)
    load_cache(folder)
    load_cache(folder)
    assert len(read) == len(FILES)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_home_that_can_not_be_written(folder, read, home, is_there, monkeypatch):
    (home / "selfspec").write_text("a file where a folder should be")
    if not is_there:
        monkeypatch.setattr(memo, "user_folder", lambda: None)
    age(folder)
    load_cache(folder)
    load_cache(folder)
    assert len(read) == 2 * len(FILES)


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

"""A folder that processes share: locked, private, whole at any moment, and never trusted."""

import logging
import multiprocessing
import os
import signal

import filelock
import numpy as np
import pytest

from selfspec.errors import (
    CacheExistsError,
    CacheTokenizerError,
    CacheVersionError,
    CacheWriteError,
)
from selfspec.store import (
    MemoryFolder,
    load_cache,
    memory_folder,
    on_top,
    read_card,
    saving,
    tokenizer_info,
    unnamed_tokenizer,
    verify_cache,
)
from tests.caches import (
    VOCAB_SIZE,
    FakeTokenizer,
    contents,
    edit_card,
    flip_byte,
    lut,
    plain,
)

NOTHING = contents(tables={}, corpus=None, calibration=None)
SPAWN = multiprocessing.get_context("spawn")


def kept(tokens=(1, 3, 9), **changes):
    return contents(**{"tables": {"lut": lut(tokens)}, "corpus": None, **changes})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mine"


@pytest.fixture
def memory(path) -> MemoryFolder:
    folder = MemoryFolder(path)
    folder.update(lambda _: kept())
    return folder


def names(path) -> list[str]:
    return sorted(os.listdir(path))


def add_rows(path, tokens) -> None:
    """What a process does that learned something: each token in a save of its own."""
    for token in tokens:
        learned = contents(tables={"lut": lut([token])}, corpus=None, calibration=[])

        def change(held, learned=learned):
            tables, _ = on_top(learned, NOTHING, held, VOCAB_SIZE)
            return contents(tables=tables, corpus=None, calibration=None)

        MemoryFolder(path).update(change)


def die_while_saving(path, step) -> None:
    def die(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(saving, step, die)
    MemoryFolder(path).update(lambda _: kept([2]))


def test_nothing_is_made_by_looking(path):
    assert MemoryFolder(path).read() is None
    assert not path.exists()


def test_what_was_written_comes_back_as_copies(memory, path):
    held = memory.read()
    assert plain(held) == plain(load_cache(path / "memory")) == plain(kept())
    assert not any(isinstance(array, np.memmap) for array in held.tables["lut"].values())


def test_only_the_owner_can_read_it(memory, path):
    folders = [path, path / "memory"]
    assert {each.stat().st_mode & 0o777 for each in folders} == {0o700}
    files = [path / "lock", *(path / "memory").iterdir()]
    assert {each.stat().st_mode & 0o777 for each in files} == {0o600}


def test_nothing_else_is_ever_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CacheExistsError, match=r"made by it \(got .*with 'notes.txt' in it\)"):
        MemoryFolder(tmp_path)
    with pytest.raises(CacheWriteError, match="Not a directory"):
        MemoryFolder(tmp_path / "notes.txt")


def test_another_tokenizers_folder_is_known_by_its_card(memory):
    memory.check_tokenizer(kept().tokenizer)
    with pytest.raises(CacheTokenizerError, match=r"remember='.*mine' was learned with 5a5a5a5a…"):
        memory.check_tokenizer(tokenizer_info(FakeTokenizer(7)))
    memory.update(lambda _: kept(tokenizer=unnamed_tokenizer(VOCAB_SIZE)))
    memory.check_tokenizer(tokenizer_info(FakeTokenizer(7)))


@pytest.mark.parametrize("how", ["byte", "card", "no card", "values"])
def test_a_damaged_one_is_kept_aside(memory, path, caplog, how):
    damage = {
        "byte": lambda folder: flip_byte(folder / "lut.safetensors"),
        "card": lambda folder: (folder / "cache.json").write_text("{"),
        "no card": lambda folder: (folder / "cache.json").unlink(),
        "values": lambda folder: edit_card(folder, lambda card: card.update(num_ids=4)),
    }
    damage[how](path / "memory")
    with caplog.at_level(logging.WARNING, "selfspec"):
        assert memory.read() is None
    assert "remember starts anew, and" in caplog.text
    assert names(path) == ["lock", "memory.damaged"]
    memory.update(lambda held: kept([5]) if held is None else held)
    assert memory.read().tables["lut"]["tokens"].tolist() == [5]


def test_only_the_last_damaged_one_is_kept(memory, path):
    for tokens in ([1], [2]):
        memory.update(lambda _, tokens=tokens: kept(tokens))
        flip_byte(path / "memory" / "calibration.json")
        assert memory.read() is None
    assert names(path) == ["lock", "memory.damaged"]
    card = read_card(path / "memory.damaged")[0]
    assert card.num_ids == kept([2]).count_ids()


def test_a_damaged_one_that_another_process_has_mended_is_read(memory, path, monkeypatch):
    """It is looked at again under the lock."""
    flip_byte(path / "memory" / "lut.safetensors")
    acquire = filelock.FileLock.acquire

    def acquire_late(lock, *args, **kwargs):
        monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
        memory.update(lambda _: kept([7]))
        return acquire(lock, *args, **kwargs)

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire_late)
    assert memory.read().tables["lut"]["tokens"].tolist() == [7]


def test_a_damaged_one_that_can_not_be_moved_stays(memory, path, caplog):
    flip_byte(path / "memory" / "lut.safetensors")
    (path / "lock").unlink()
    (path / "lock").mkdir()  # It can't be opened, not even by root.
    with caplog.at_level(logging.WARNING, "selfspec"):
        assert memory.read() is None
    assert "remember starts anew, since lut.safetensors of cache" in caplog.text
    assert (path / "memory").exists()


def test_what_a_newer_version_wrote_is_left_alone(memory, path):
    edit_card(path / "memory", lambda card: card.update(format_version=99))
    for use in (memory.read, lambda: memory.update(lambda _: kept())):
        with pytest.raises(CacheVersionError):
            use()
    assert names(path) == ["lock", "memory"]


def test_a_failed_write_is_one_error(memory, path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saving, "put_in_place", refuse)
    with pytest.raises(CacheWriteError, match="Permission denied"):
        memory.update(lambda _: kept([2]))
    assert plain(memory.read()) == plain(kept())


def test_a_lock_that_is_never_released_ends_the_waiting(memory, path, monkeypatch):
    monkeypatch.setattr(memory_folder, "_MAX_WAIT", 0.0)
    with (
        filelock.FileLock(path / "lock"),
        pytest.raises(CacheWriteError, match="could not be acquired"),
    ):
        memory.update(lambda _: kept())


@pytest.mark.parametrize("step", ["write_tensors", "sync", "put_in_place"])
def test_killed_while_saving_leaves_a_whole_folder(memory, path, step):
    process = SPAWN.Process(target=die_while_saving, args=(path, step))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert verify_cache(path / "memory").ok
    assert plain(memory.read()) == plain(kept())
    assert len(names(path)) == 3  # What it had begun lies there until the next save.
    add_rows(path, [2])
    assert names(path) == ["lock", "memory"]
    assert memory.read().tables["lut"]["tokens"].tolist() == [1, 2, 3, 9]


def test_killed_between_two_renames_loses_nothing(memory, path):
    """On a system that can't exchange two folders in one step."""
    (path / "memory").rename(path / ".memory.5a5a.old")
    add_rows(path, [2])
    assert names(path) == ["lock", "memory"]
    assert memory.read().tables["lut"]["tokens"].tolist() == [1, 2, 3, 9]


def test_processes_that_save_at_once_lose_nothing(path):
    parts = [range(start, VOCAB_SIZE, 3) for start in range(3)]
    processes = [SPAWN.Process(target=add_rows, args=(path, list(part))) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert MemoryFolder(path).read().tables["lut"]["tokens"].tolist() == list(range(VOCAB_SIZE))
    assert names(path) == ["lock", "memory"]

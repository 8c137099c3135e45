"""A folder is written whole or not at all, whoever else writes, reads or dies meanwhile."""

import multiprocessing
import os
import shutil

import pytest

from selfspec.errors import CacheError, CacheExistsError, CacheWriteError
from selfspec.store import (
    check_target,
    load_cache,
    loading,
    save_cache,
    saving,
    swap,
    verify_cache,
)
from tests.caches import FILES, contents, count_grams, lut, plain

OTHER = contents(tables={"lut": lut([2, 4])}, corpus=count_grams([7, 8] * 9), about={"n": 2})

BOTH = (contents(), OTHER)


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_whoever_may_read_the_card_may_read_the_tables(folder):
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(modes) == 1


def test_folders_above_it_are_made_and_a_home_is_meant_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_cache("~/a/b/cache", contents())
    assert plain(load_cache("~/a/b/cache")) == plain(contents())
    assert verify_cache(tmp_path / "a" / "b" / "cache").ok


def test_what_is_there_stays(folder, tmp_path):
    with pytest.raises(CacheExistsError, match=r"must be free \(got .*cache', which exists\)"):
        save_cache(folder, OTHER)
    assert plain(load_cache(folder)) == plain(contents())
    (tmp_path / "file").write_text("text")
    with pytest.raises(CacheExistsError, match="must be free"):
        save_cache(tmp_path / "file", OTHER)


def test_an_empty_folder_is_free(tmp_path):
    (tmp_path / "cache").mkdir()
    save_cache(tmp_path / "cache", contents())
    assert verify_cache(tmp_path / "cache").ok


def test_nothing_but_a_cache_folder_is_overwritten(folder, tmp_path):
    (folder / "README.md").write_text("mine")
    (tmp_path / "file").write_text("text")
    with pytest.raises(CacheExistsError, match=r"cache folder with no other files .*'README.md'"):
        save_cache(folder, OTHER, overwrite=True)
    with pytest.raises(CacheExistsError, match="with 'file' in it"):
        save_cache(tmp_path / "file", OTHER, overwrite=True)
    (folder / "README.md").unlink()
    (folder / "cache.json").unlink()
    with pytest.raises(CacheExistsError, match=r"without cache\.json"):
        check_target(folder, overwrite=True)


def test_a_link_stays_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to("cache")
    save_cache(tmp_path / "link", OTHER, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert plain(load_cache(folder)) == plain(OTHER)


def test_a_parent_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(CacheWriteError, match=r"must be writable at .*\(got: Not a directory\)"):
        save_cache(tmp_path / "file" / "cache", contents())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["write_tensors", "sync", "put_in_place"])
def test_what_breaks_off_leaves_the_old_one_and_no_litter(folder, monkeypatch, step, error):
    def broken(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(saving, step, broken)
    with pytest.raises((CacheWriteError, KeyboardInterrupt)):
        save_cache(folder, OTHER, overwrite=True)
    assert names(folder.parent) == ["cache"]
    assert plain(load_cache(folder)) == plain(contents())


def test_everything_is_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    synced = []
    sync, place = saving.sync, saving.put_in_place

    def placed(new, target, *, overwrite):
        assert sorted(synced) == sorted(["cache.json", *FILES, new.name])
        place(new, target, overwrite=overwrite)

    monkeypatch.setattr(saving, "sync", lambda path: (synced.append(path.name), sync(path)))
    monkeypatch.setattr(saving, "put_in_place", placed)
    save_cache(tmp_path / "cache", contents())


def _no_exchange(*_args) -> bool:
    return False


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch) -> str:
    """With the system's exchange of two folders, and without."""
    if request.param == "two renames":
        monkeypatch.setattr(swap, "_exchange", _no_exchange)
    return request.param


def test_overwriting_either_way(folder, way):
    """What was loaded before stays readable."""
    loaded = load_cache(folder)
    save_cache(folder, OTHER, overwrite=True)
    assert names(folder.parent) == ["cache"]
    assert plain(load_cache(folder)) == plain(OTHER)
    assert plain(loaded) == plain(contents())


def test_a_reader_between_the_renames_waits(folder, way, monkeypatch):
    """It finds no folder, sees that one is coming, and looks again."""
    parked = folder.parent / ".cache.5a5a.old"
    folder.rename(parked)
    monkeypatch.setattr(loading.time, "sleep", lambda _: parked.rename(folder))
    assert plain(load_cache(folder)) == plain(contents())


def test_a_reader_that_meets_a_new_folder_starts_over(folder, monkeypatch):
    """It has read the old card, and then finds the new files."""
    read = loading.read_card

    def read_and_swap(path):
        card = read(path)
        monkeypatch.setattr(loading, "read_card", read)
        save_cache(folder, OTHER, overwrite=True)
        return card

    monkeypatch.setattr(loading, "read_card", read_and_swap)
    assert plain(load_cache(folder)) == plain(OTHER)


def _write_often(folder, which, way, times) -> None:
    if way == "two renames":
        swap._exchange = _no_exchange
    for _ in range(times):
        save_cache(folder, BOTH[which], overwrite=True)


def test_two_processes_write_and_one_reads(folder, way):
    """A reader sees one of the two and nothing in between; no litter stays."""
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write_often, args=(folder, which, way, 25)) for which in (0, 1)
    ]
    for writer in writers:
        writer.start()
    good = [plain(held) for held in BOTH]
    reads = 0
    while any(writer.is_alive() for writer in writers):
        assert plain(load_cache(folder)) in good
        reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert reads > 0
    assert names(folder.parent) == ["cache"]
    assert verify_cache(folder).ok


def _write_new(folder, which, results) -> None:
    try:
        save_cache(folder, BOTH[which])
    except CacheError as error:
        results.put(type(error).__name__)
    else:
        results.put("written")


def test_of_two_processes_one_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    writers = [
        context.Process(target=_write_new, args=(tmp_path / "cache", which, results))
        for which in (0, 1)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(results.get() for _ in writers) == ["CacheExistsError", "written"]
    assert names(tmp_path) == ["cache"]
    assert plain(load_cache(tmp_path / "cache")) in [plain(held) for held in BOTH]


def test_a_folder_that_another_writer_moves_away_is_a_free_place(folder, monkeypatch):
    """Between asking whether it is there and what is in it."""
    listdir = os.listdir

    def moved_away(path):
        if path == folder and folder.exists():
            shutil.rmtree(folder)
        return listdir(path)

    monkeypatch.setattr(saving.os, "listdir", moved_away)
    assert saving.check_target(folder, overwrite=True) == folder


def test_a_racing_writer_is_refused_at_the_last_moment(tmp_path, monkeypatch):
    write = saving.write_files

    def write_while_another_wins(folder, held):
        write(folder, held)
        monkeypatch.setattr(saving, "write_files", write)
        save_cache(tmp_path / "cache", OTHER)

    monkeypatch.setattr(saving, "write_files", write_while_another_wins)
    with pytest.raises(CacheExistsError, match="must be free"):
        save_cache(tmp_path / "cache", contents())
    assert names(tmp_path) == ["cache"]
    assert plain(load_cache(tmp_path / "cache")) == plain(OTHER)


def test_a_folder_that_goes_away_meanwhile_is_no_obstacle(folder, way, monkeypatch):
    renamed, calls = swap._renamed, []

    def renamed_once_taken(new, target):
        calls.append(target)
        if len(calls) == 2:
            shutil.rmtree(target, ignore_errors=True)
        return False if len(calls) == 1 else renamed(new, target)

    monkeypatch.setattr(swap, "_renamed", renamed_once_taken)
    save_cache(folder, OTHER, overwrite=True)
    assert names(folder.parent) == ["cache"]
    assert plain(load_cache(folder)) == plain(OTHER)

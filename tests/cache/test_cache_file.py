"""A file is written whole or not at all, what is no whole cache is refused, and whose it is."""

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from selfspec.cache import CacheContents, check_target, load_cache, save_cache, tokenizer_info
from selfspec.errors import CacheError
from tests.caches import OWNER, FakeTokenizer, contents, lut, lut2, plain
from tests.strategies import damaged

OTHER = contents(tables={"lut": lut([2, 4])}, about={"n": 2})
FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path) -> Path:
    save_cache(tmp_path / "cache", contents())
    return tmp_path / "cache.safetensors"


def refused(path, said) -> None:
    with pytest.raises(CacheError) as raised:
        load_cache(path)
    assert str(raised.value).isprintable()
    assert repr(str(path)) in str(raised.value)
    assert said in str(raised.value)


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


class TestRoundTrip:
    @pytest.mark.parametrize(
        "held", [contents(), OTHER, CacheContents(tokenizer=OWNER)], ids=range(3)
    )
    def test_whatever_is_saved_is_loaded(self, tmp_path, held):
        paths = [tmp_path / name for name in ("one.safetensors", "two.safetensors")]
        save_cache(paths[0], held)
        loaded = load_cache(paths[0])
        assert plain(loaded) == plain(held)
        save_cache(paths[1], loaded)
        assert paths[0].read_bytes() == paths[1].read_bytes()

    def test_what_was_loaded_needs_the_file_no_more(self, path):
        """As a map of the file, reading it would end this process."""
        loaded = load_cache(path)
        os.truncate(path, 0)
        assert plain(loaded) == plain(contents())

    def test_the_name_may_lack_its_ending(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        save_cache("~/a/b/cache.v2", contents())
        assert names(tmp_path / "a" / "b") == ["cache.v2.safetensors"]
        for name in ("~/a/b/cache.v2", tmp_path / "a" / "b" / "cache.v2.safetensors"):
            assert plain(load_cache(name)) == plain(contents())


def test_rates_of_sources_that_were_renamed_are_read(tmp_path):
    rates = [[[["lut", 0, 1, 1, 0], ["runners", 0, 1, 1, 2]], 1.0, 4.0]]
    save_cache(tmp_path / "cache", contents(calibration=rates))
    (rate,) = load_cache(tmp_path / "cache").calibration
    assert [kind[0] for kind in rate[0]] == ["lut", "near_misses"]


def test_what_could_not_be_read_is_not_written(tmp_path):
    for changes in (
        {"about": {"share": float("nan")}},
        {"about": {"name": "\ud800"}},
        {"calibration": [[[["lut", 0, 1, 1, 0]], 3.0, 2.0]]},
        {"tables": {"lutt": lut()}},
        {"tables": {"lut": {**lut(), "ids": lut()["ids"][:, :2]}}},
    ):
        with pytest.raises(CacheError, match="can't be saved"):
            save_cache(tmp_path / "cache", contents(**changes))
    assert names(tmp_path) == []


def header(entry) -> bytes:
    """A file with one array."""
    data = json.dumps({"__metadata__": {"selfspec": "{}"}, "lut.ids": entry}).encode()
    return len(data).to_bytes(8, "little") + data + bytes(8)


class TestRefused:
    @pytest.mark.parametrize(
        "data",
        [
            *(b"", b"text" * 99, b"\xff" * 99, (2).to_bytes(8, "little") + b"[]"),
            header({"dtype": "I32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}),
            header({"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}),  # not numpy's
            header({"dtype": "U8", "shape": [1] * 99 + [8], "data_offsets": [0, 8]}),
            *(7, 8, 100, -1),  # the beginning of a good one
        ],
    )
    def test_what_is_no_file_of_arrays(self, path, data):
        path.write_bytes(path.read_bytes()[:data] if isinstance(data, int) else data)
        refused(path, "can't be read")

    def test_a_huge_one(self, path):
        """On disk it takes a page."""
        size = 1 << 42
        path.write_bytes(header({"dtype": "I32", "shape": [size // 4], "data_offsets": [0, size]}))
        os.truncate(path, path.stat().st_size - 8 + size)
        refused(path, "free memory")

    def test_no_plain_file(self, tmp_path):
        """Nobody writes to the pipe, and the device never ends."""
        kinds = [
            tmp_path / f"{name}.safetensors" for name in ("folder", "pipe", "device", "circle")
        ]
        folder, pipe, device, circle = kinds
        folder.mkdir()
        os.mkfifo(pipe)
        device.symlink_to("/dev/zero")
        circle.symlink_to(circle.name)
        for path in (folder, pipe, device):
            refused(path, "no plain file")
        refused(circle, "symbolic links")
        refused(tmp_path / "nothing.safetensors", "selfspec cache build")

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"format_version": 4}, "got 4"),
            ({"tokenizer": {**vars(OWNER), "name": 5}}, "tokenizer.name"),
            ({"about": "text"}, "about"),
            ({"calibration": [[[["lut", 0, 1, 1]], 1.0, 2.0]]}, "calibration.0.0"),
            ({"calibration": [[[["lut", 0, 1, 1, 0]], 0, 0]]}, "trials > 0"),
            ({"calibration": [[[["lut", 0, 1, 1, 0]], 1.0, float("inf")]]}, "calibration"),
            ({"calibration": [[[["lut", 0, 1, 1, 0]], float("nan"), 2.0]]}, "calibration"),
            *((text, "its card") for text in ("", "{", "[]", "null", "[" * 100_000, "\x00")),
        ],
        ids=range(13),
    )
    def test_a_wrong_card(self, path, changes, said):
        wrong = changes if isinstance(changes, str) else json.dumps({**card_of(path), **changes})
        save_file(load_file(path), path, metadata={"selfspec": wrong})
        refused(path, said)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"lut.tokens": lut([-1, 1, 9])["tokens"]}, "lut"),
            ({"lut.ids": lut()["ids"] - 2}, "lut"),
            ({"lut.ids": lut()["ids"].astype(np.int64)}, "I32"),
            ({"lut.ids": lut()["ids"][0]}, "shape"),
            ({"lut2.pairs": lut2()["pairs"][:, 0]}, "lut2"),
            ({"answers.tokens": lut()["ids"]}, "answers"),
            ({"answers.ids": lut()["tokens"]}, "answers"),
            ({"answers.tokens": lut()["tokens"] - 5}, "answers"),
            ({"lutt.\x1b[31m": np.zeros(3, np.int32)}, "'lutt'"),
            ({"\x1b[31m.ids": np.zeros(3, np.int32)}, "[31m"),
        ],
        ids=range(10),
    )
    def test_a_wrong_table(self, path, changes, said):
        arrays = {name: a for name, a in {**load_file(path), **changes}.items() if a is not None}
        save_file(arrays, path, metadata={"selfspec": json.dumps(card_of(path))})
        refused(path, said)

    def test_a_file_of_something_else(self, path):
        save_file({"weight": np.zeros(3)}, path)
        refused(path, "no cache of selfspec")

    @pytest.fixture
    def good(self, path) -> bytes:
        return path.read_bytes()

    @FUZZ
    @given(data=st.data())
    def test_bytes_that_changed(self, path, good, data):
        """A file is read or refused; nothing else comes out."""
        path.write_bytes(data.draw(damaged(good)))
        with suppress(CacheError):
            load_cache(path).count_ids()


def card_of(path) -> dict:
    with safe_open(path, framework="numpy") as held:
        return json.loads(held.metadata()["selfspec"])


def test_what_older_versions_kept_beside_is_left_out(path):
    """Version 0.3 kept what a map of hidden states begins with, and counted phrases."""
    more = {"map.mean": np.ones(5, np.float16), "corpus.token.1": np.ones(5, np.uint16)}
    arrays = {**load_file(path), **more}
    save_file(arrays, path, metadata={"selfspec": json.dumps(card_of(path))})
    assert plain(load_cache(path)) == plain(contents())


class TestSaving:
    def test_what_is_there_stays(self, path):
        with pytest.raises(CacheError, match="must not be there yet"):
            save_cache(path, OTHER)
        assert plain(load_cache(path)) == plain(contents())
        save_cache(path, OTHER, overwrite=True)
        assert plain(load_cache(path)) == plain(OTHER)
        assert names(path.parent) == [path.name]

    def test_nothing_but_a_cache_is_overwritten(self, tmp_path):
        save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
        (tmp_path / "text.safetensors").write_text("text")
        (tmp_path / "folder.safetensors").mkdir()
        os.mkfifo(tmp_path / "pipe.safetensors")
        for name in ("model", "text", "folder", "pipe"):
            with pytest.raises(CacheError, match=r"must be a cache.*; name another file$"):
                check_target(tmp_path / name, overwrite=True)

    def test_one_that_is_overwritten_keeps_its_mode(self, path):
        for mode in (0o600, 0o664):
            path.chmod(mode)
            save_cache(path, OTHER, overwrite=True)
            assert path.stat().st_mode & 0o777 == mode

    def test_a_place_that_can_not_be_written_is_refused_before_any_work(self, tmp_path):
        (tmp_path / "file").touch()
        long = tmp_path / ("x" * 300)
        for name in (tmp_path / "file" / "cache", "/proc/cache", "/proc/none/cache", long):
            with pytest.raises(CacheError, match="be written"):
                save_cache(name, contents())
        with pytest.raises(CacheError, match="folder that can be written"):
            check_target(tmp_path / "file" / "cache")

    @pytest.mark.parametrize(
        ("step", "error"), [("fsync", OSError(5, "I/O")), ("replace", KeyboardInterrupt())]
    )
    def test_what_breaks_off_leaves_the_old_one_and_no_litter(self, path, monkeypatch, step, error):
        def broken(*_args):
            raise error

        monkeypatch.setattr(os, step, broken)
        with pytest.raises((CacheError, KeyboardInterrupt)):
            save_cache(path, OTHER, overwrite=True)
        assert names(path.parent) == [path.name]
        assert plain(load_cache(path)) == plain(contents())


def test_its_vocabulary_is_its_fingerprint():
    one, same = tokenizer_info(FakeTokenizer()), tokenizer_info(FakeTokenizer(name="other/one"))
    turned = FakeTokenizer()
    turned.vocab = dict(reversed(turned.vocab.items()))
    assert one.fingerprint == same.fingerprint == tokenizer_info(turned).fingerprint
    assert one.vocab_size == 50
    turned.vocab["token 7"], turned.vocab["token 8"] = 8, 7
    assert one.fingerprint != tokenizer_info(turned).fingerprint
    assert tokenizer_info(one) is one


@pytest.mark.parametrize("name", ["/home/me/models/mine", "C:\\models\\mine", "mine"])
def test_paths_are_nobodys_business(name):
    assert tokenizer_info(FakeTokenizer(name=name)).name == "mine"
    assert tokenizer_info(FakeTokenizer(name="owner/mine")).name == "owner/mine"


@pytest.mark.parametrize(
    "changes",
    [
        {"tables": {"lut": lut([1, 40])}},
        {"tables": {"lut2": lut2([(40, 1)])}},
        {"tables": {"lut": {**lut(), "ids": lut()["ids"] * 0 + 40}}},
        {"answers": np.array([3, 40, -1], np.int32)},
    ],
)
def test_ids_are_counted_in_every_table(changes):
    assert contents(**{"tables": {}, "answers": None, **changes}).count_ids() == 41

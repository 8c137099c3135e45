"""Each way to damage a real folder is refused, by name, before anything of it is used."""

import json
import os
import shutil

import pytest
from safetensors.numpy import save_file

from selfspec.errors import (
    CacheCardError,
    CacheChecksumError,
    CacheError,
    CacheFileError,
    CacheFormatError,
    CacheNotFoundError,
    CachePathError,
    CacheSizeError,
    CacheVersionError,
)
from selfspec.store import load_cache, save_cache, verify_cache
from tests.caches import FILES, TEXT, bless, contents, count_grams, edit_card, flip_byte, plain


def refused(folder, error, match) -> None:
    """Both doors refuse it."""
    with pytest.raises(error, match=match) as raised:
        load_cache(folder)
    assert type(raised.value) is error
    try:
        verdicts = verify_cache(folder)
    except CacheError as problem:
        problems = [problem]
    else:
        problems = [problem for problem in verdicts.values() if problem is not None]
        assert not verdicts.ok
    assert [type(problem) for problem in problems] == [error]


@pytest.mark.parametrize("name", FILES)
class TestFiles:
    @pytest.mark.parametrize("position", [0, 9, -1])
    def test_a_flipped_byte(self, folder, name, position):
        flip_byte(folder / name, position)
        refused(folder, CacheChecksumError, f"{name} of cache .* must have the sha256 .*damaged")

    @pytest.mark.parametrize("size", [0, 7, -1])
    def test_a_cut_off_file(self, folder, name, size):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:size])
        refused(folder, CacheSizeError, f"{name} of cache .* bytes .*it was cut off")

    def test_a_file_that_grew(self, folder, name):
        with (folder / name).open("ab") as file:
            file.write(b"\0")
        refused(folder, CacheSizeError, f"{name} of cache .*it was grown")

    def test_a_missing_file(self, folder, name):
        (folder / name).unlink()
        refused(folder, CacheFileError, f"must hold the file {name} .*No such file")

    def test_a_folder_or_a_pipe_in_its_place(self, folder, name):
        (folder / name).unlink()
        (folder / name).mkdir()
        refused(folder, CacheFileError, f"must hold the file {name}")
        (folder / name).rmdir()
        os.mkfifo(folder / name)
        refused(folder, CacheFileError, f"must hold the file {name} .*no plain file")

    def test_a_link_out_of_the_folder(self, folder, name, tmp_path):
        (folder / name).rename(tmp_path / "outside")
        (folder / name).symlink_to(tmp_path / "outside")
        refused(folder, CachePathError, f"{name} of cache .* must lie in that folder .*outside")

    def test_links_in_a_circle(self, folder, name):
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)
        refused(folder, CacheFileError, f"must hold the file {name}")

    def test_a_link_within_the_folder_is_fine(self, folder, name):
        (folder / name).rename(folder / "elsewhere")
        (folder / name).symlink_to("elsewhere")
        assert plain(load_cache(folder)) == plain(contents())

    def test_anything_else_under_a_right_checksum(self, folder, name):
        (folder / name).write_bytes(b"not what it says")
        bless(folder, name)
        refused(folder, CacheFormatError, f"{name} of cache")


@pytest.mark.parametrize("shared", [False, True])
def test_a_hub_snapshots_links_are_fine(folder, tmp_path, shared):
    """There every file is a link into the repository's own blobs, or on to shared ones."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "5a5a"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "blobs" / "5a" if shared else blobs)
    blobs.mkdir(exist_ok=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        if shared:
            (blobs / path.name).symlink_to(f"../../blobs/5a/{path.name}")
    assert plain(load_cache(snapshot)) == plain(contents())


class TestCard:
    @pytest.mark.parametrize("how", ["nothing there", "a file", "an empty folder", "no card"])
    def test_no_cache_folder(self, folder, tmp_path, how):
        shutil.rmtree(folder)
        if how == "a file":
            folder.write_text("text")
        elif how == "an empty folder":
            folder.mkdir()
        elif how == "no card":
            save_cache(folder, contents())
            (folder / "cache.json").unlink()
        refused(folder, CacheNotFoundError, r"must hold a cache.json .*'selfspec cache build'")

    def test_a_newer_version(self, folder):
        """Of a newer card nothing else is looked at: it may say anything."""
        (folder / "cache.json").write_text('{"format_version": 3, "files": "elsewhere"}')
        refused(folder, CacheVersionError, r"format version 2 or older \(got 3\); upgrade selfspec")

    def test_any_letter_or_digit_that_changes(self, folder):
        """Of every card with one character changed, none is taken for the card that was written."""
        card = folder / "cache.json"
        text = card.read_text()
        for position, character in enumerate(text):
            if character.isalnum():
                other = "1" if character == "0" else chr(ord(character) ^ 1)
                card.write_text(text[:position] + other + text[position + 1 :])
                with pytest.raises(CacheError, match="cache"):
                    load_cache(folder)
        card.write_text(text)
        assert plain(load_cache(folder)) == plain(contents())

    def test_a_changed_card_is_refused_by_name(self, folder):
        text = (folder / "cache.json").read_text()
        (folder / "cache.json").write_text(text.replace('"prefixes": 18', '"prefixes": 19'))
        refused(folder, CacheChecksumError, r"cache.json of cache .* the checksum .*damaged")

    def test_other_white_space_is_the_same_card(self, folder):
        card = json.loads((folder / "cache.json").read_text())
        (folder / "cache.json").write_text(json.dumps(card))
        assert plain(load_cache(folder)) == plain(contents())

    def test_a_card_of_version_1_has_no_checksum(self, folder):
        card = json.loads((folder / "cache.json").read_text())
        del card["checksum"]
        (folder / "cache.json").write_text(json.dumps(card))
        refused(folder, CacheCardError, "checksum must be a str")
        (folder / "cache.json").write_text(json.dumps({**card, "format_version": 1}))
        assert plain(load_cache(folder)) == plain(contents())
        assert verify_cache(folder).ok

    @pytest.mark.parametrize(
        "name",
        ["../x", "/etc/passwd", "..", ".", "", "a/b", "..\\x", "C:x", "a\0b", "../lut.safetensors"],
    )
    def test_a_path_that_leaves(self, folder, name):
        def rename(card):
            card["files"][name] = card["files"].pop("lut.safetensors")

        edit_card(folder, rename)
        refused(folder, CachePathError, "must name files in that folder .*do not use it")

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"{",
            b"\xff",
            b"[]",
            b"null",
            b"{}",
            b"[" * 100_000,
            b'{"format_version": "1"}',
            b'{"format_version": true}',
            b'{"format_version": 0}',
            b'{"format_version": 1}',
            b" " * (1 << 25),
        ],
        ids=lambda data: repr(data[:24]),
    )
    def test_no_card_at_all(self, folder, data):
        (folder / "cache.json").write_bytes(data)
        refused(
            folder, CacheCardError, r"cache.json of cache .* must be a card that selfspec wrote"
        )

    def test_a_pipe_or_a_device_in_its_place(self, folder):
        """Nobody writes to the pipe, and the device never ends."""
        (folder / "cache.json").unlink()
        os.mkfifo(folder / "cache.json")
        refused(folder, CacheNotFoundError, r"must hold a cache.json .*no plain file")
        (folder / "cache.json").unlink()
        (folder / "cache.json").symlink_to("/dev/zero")
        refused(folder, CachePathError, r"cache.json .* must lie in that folder .*'/dev/zero'")

    def test_of_a_large_file_only_the_start_is_read(self, folder):
        os.truncate(folder / "cache.json", 1 << 40)
        refused(folder, CacheCardError, "at most 16777216 bytes")

    def test_any_depth(self, folder):
        """Some depths can be read by Python's JSON and not be written again for the checksum."""
        for depth in range(700, 1000):
            about = "[" * depth + "]" * depth
            text = f'{{"format_version": 2, "checksum": "{"a" * 64}", "about": {about}}}'
            (folder / "cache.json").write_text(text)
            with pytest.raises(CacheError):
                load_cache(folder)

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (["num_ids"], -1),
            (["num_ids"], 2.5),
            (["num_ids"], None),
            (["top_k"], "4"),
            (["max_prefix"], -2),
            (["counts"], []),
            (["counts", "lut"], "3"),
            (["about"], "text"),
            (["tokenizer"], None),
            (["tokenizer", "name"], 5),
            (["tokenizer", "vocab_size"], -1),
            (["files"], []),
            (["files", "lut.safetensors"], "here"),
            (["files", "lut.safetensors", "sha256"], None),
            (["files", "lut.safetensors", "size"], "12"),
            (["files", "weights.pkl"], {"sha256": "5a" * 32, "size": 1}),
        ],
        ids=str,
    )
    def test_a_wrong_entry(self, folder, place, value):
        def change(card):
            *above, last = place
            for name in above:
                card = card[name]
            card[last] = value

        edit_card(folder, change)
        refused(folder, CacheCardError, "must be a card that selfspec wrote")


def header(entry) -> bytes:
    data = json.dumps({"lut.ids": entry}).encode()
    return len(data).to_bytes(8, "little") + data


GOOD = {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8 + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        header(GOOD),
        header(GOOD) + b"\0" * 7,
        header(GOOD) + b"\0" * 9,
        header({**GOOD, "dtype": "BF16"}) + b"\0" * 8,
        header({**GOOD, "dtype": ["I32"]}) + b"\0" * 8,
        header({**GOOD, "shape": [3]}) + b"\0" * 8,
        header({**GOOD, "shape": [-2]}) + b"\0" * 8,
        header({**GOOD, "shape": [2**62, 2**62]}) + b"\0" * 8,
        header({**GOOD, "shape": [True]}) + b"\0" * 8,
        header({**GOOD, "shape": 2}) + b"\0" * 8,
        header({**GOOD, "shape": [1] * 99 + [2]}) + b"\0" * 8,
        header({**GOOD, "data_offsets": [8, 0]}) + b"\0" * 8,
        header({**GOOD, "data_offsets": [-8, 0]}) + b"\0" * 8,
        header({**GOOD, "data_offsets": [2**64, 2**64 + 8]}) + b"\0" * 8,
        header({**GOOD, "data_offsets": [4, 12]}) + b"\0" * 12,
        header({**GOOD, "data_offsets": [0]}) + b"\0" * 8,
        header("text"),
        header(None),
    ],
    ids=lambda data: repr(data[8:70]),
)
def test_a_hostile_header(folder, data):
    (folder / "lut.safetensors").write_bytes(data)
    bless(folder, "lut.safetensors")
    refused(folder, CacheFormatError, "lut.safetensors of cache")


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [[]],
        [[[], 1.0, 2.0]],
        [[[["lut", 0, 1, 1]], 1.0, 2.0]],
        [[[["lut", 0, 1, 1, "0"]], 1.0, 2.0]],
        [[[["lut", 0, 1, 1, 0]], 3.0, 2.0]],
        [[[["lut", 0, 1, 1, 0]], 0, 0]],
        [[[["lut", 0, 1, 1, 0]], "1", 2.0]],
        [[[["lut", 0, 1, 1, 0]], 1.0, float("inf")]],
        [[[["lut", 0, 1, 1, 0]], float("nan"), 2.0]],
    ],
)
def test_rates_that_are_none(folder, rows):
    (folder / "calibration.json").write_text(json.dumps(rows))
    bless(folder, "calibration.json")
    refused(folder, CacheFormatError, "calibration must be rows of evidence, hits and trials")


def test_corpus_tables_without_one_of_their_arrays(folder):
    arrays = count_grams(TEXT).arrays()
    del arrays["total.2"]
    save_file(arrays, folder / "corpus.safetensors")
    bless(folder, "corpus.safetensors")
    refused(folder, CacheFormatError, "total.2 is missing")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"parents": [0, 2, 1]}, r"parents come before their children \(got 2 above node 2\)"),
        ({"ranks": [0, -1, 1]}, "ranks >= 0"),
        ({"ranks": [0, 0, 1]}, "no place twice"),
        ({"chances": [0.6, 0.7, 0.65]}, r"at most those above \(got 0.65\)"),
        ({"chances": [0.6, 0.2]}, "three lists of one length"),
        ({"parents": [], "ranks": [], "chances": []}, "2 to 1024 nodes"),
        ({"more": 1}, "with parents, ranks, chances"),
    ],
)
def test_a_fitted_tree_that_is_none(folder, change, rule):
    tree = json.loads((folder / "fitted.json").read_text())
    (folder / "fitted.json").write_text(json.dumps(tree | change))
    bless(folder, "fitted.json")
    refused(folder, CacheFormatError, f"fitted.json of cache .* must hold a fitted tree .*{rule}")

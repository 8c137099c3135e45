"""Plain text files: whole, by lines, by paragraphs, packed; what is no text gives nothing."""

import bz2
import gzip
import lzma

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.building import plain
from selfspec.building.plain import read_plain
from selfspec.errors import BuildError

TEXT = "one\ntwo\n\nthree\n  \n\nfour é\n"


@pytest.mark.parametrize(
    ("form", "documents"),
    [
        ("document", [TEXT]),
        ("line", ["one", "two", "", "three", "  ", "", "four é"]),
        ("paragraph", ["one\ntwo\n", "three\n", "four é\n"]),
    ],
)
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_forms_and_packings(tmp_path, form, documents, suffix, pack):
    path = tmp_path / f"notes.txt{suffix}"
    path.write_bytes(pack(TEXT.encode()))
    assert list(read_plain(path, form)) == documents


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text("ab\né", max_size=60), piece=st.integers(1, 20))
def test_pieces_add_up_to_the_file(tmp_path, monkeypatch, text, piece):
    monkeypatch.setattr(plain, "PIECE", piece)
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    pieces = list(read_plain(path, "document"))
    assert "".join(pieces) == text
    assert all(0 < len(each) < 2 * piece for each in pieces)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text("ab\n ", max_size=60))
def test_paragraphs_hold_every_line_that_is_not_blank(tmp_path, text):
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    assert "".join(read_plain(path, "paragraph")) == "".join(lines)


def test_pictures_and_empty_files_give_nothing(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"PNG\0\0\1")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert list(read_plain(tmp_path / "picture.png", "document")) == []
    assert list(read_plain(tmp_path / "empty.txt", "document")) == []


def test_what_is_not_utf8_is_replaced(tmp_path):
    (tmp_path / "old.txt").write_bytes(b"caf\xe9 noir")
    assert list(read_plain(tmp_path / "old.txt", "document")) == ["caf� noir"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.gz", gzip.compress(b"x" * 9999)[:-9]),
        ("a.gz", b"no gzip"),
        ("a.xz", b"no xz"),
        ("a.bz2", b"no bz2"),
    ],
    ids=["cut off", "no gzip", "no xz", "no bz2"],
)
def test_broken_packings_are_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BuildError, match=name.replace(".", r"\.")):
        list(read_plain(tmp_path / name, "document"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BuildError, match="gone"):
        list(read_plain(tmp_path / "gone.txt", "line"))

"""The same documents in the same order from every format, and their token ids."""

import bz2
import csv
import gzip
import json
import lzma
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from selfspec.building.recipe import Recipe
from selfspec.building.texts import encode, find_files, read_documents
from selfspec.errors import BuildError

pytestmark = pytest.mark.usefixtures("loads_datasets")

TEXTS = ["one\ntwo", 'three, "four"', "fünf\tsechs"]
PLAIN = "one\ntwo\n\nthree\n  \n\nfour é\n"
ASK = {"role": "user", "content": "say a"}
ANSWER = {"role": "assistant", "content": "a"}


def read(data, **keys):
    return list(read_documents(Recipe.of(name="n", data=str(data), **keys)))


def write(path, rows, column="text"):
    """Rows in the format that the name asks for."""
    dicts = [{column: row} for row in rows]
    kind = path.name.split(".", 1)[1]
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(dicts), path)
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([[column], *([row] for row in rows)])
    else:
        lines = "".join(json.dumps(row) + "\n" for row in dicts)
        text = json.dumps(dicts) if kind == "json" else lines
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    return path


def fill(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


class TestFiles:
    @pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
    def test_every_format_gives_the_same(self, tmp_path, name):
        path = write(tmp_path / name, [*TEXTS, ""], "body")
        assert read(path, column="body") == [*TEXTS, None]
        assert read(tmp_path, column="body", max_documents=2) == TEXTS[:2]

    def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(self, tmp_path):
        fill(tmp_path, "b/c.txt", "a.txt", "b/a.md", ".git/x", "b/.hidden", "v1.2.notes")
        builder, found = find_files(Recipe.of(data=str(tmp_path)))
        names = ("a.txt", "b/a.md", "b/c.txt", "v1.2.notes")
        assert (builder, found) == ("text", [str(tmp_path / name) for name in names])
        _, some = find_files(Recipe.of(data=str(tmp_path), data_files=["*.txt", "b/*.md"]))
        assert some == found[:2]

    @pytest.mark.parametrize(
        ("form", "expected"),
        [
            ("document", [PLAIN]),
            ("line", ["one", "two", None, "three", "  ", None, "four é"]),
            ("paragraph", ["one\ntwo\n", "three\n", "four é\n"]),
        ],
    )
    def test_plain_text(self, tmp_path, form, expected):
        packs = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
        for suffix, pack in packs.items():
            path = tmp_path / f"notes.txt{suffix}"
            path.write_bytes(pack(PLAIN.encode()))
            assert read(path, form=form) == expected

    def test_pictures_give_nothing_and_what_is_not_utf8_is_replaced(self, tmp_path):
        (tmp_path / "a.png").write_bytes(b"PNG\0\0\1")
        (tmp_path / "old.txt").write_bytes(b"caf\xe9 noir")
        assert read(tmp_path) == ["caf� noir"]

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("a.jsonl", b'{"text": "x"}\n{"text": \n'),
            ("a.parquet", b"no parquet"),
            ("a.jsonl.gz", b"no gzip"),
            ("a.jsonl", b""),
            ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-9]),
            ("a.txt.xz", b"no xz"),
        ],
    )
    def test_files_that_are_broken(self, tmp_path, name, data):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BuildError, match="can't be read"):
            read(tmp_path / name)

    @pytest.mark.parametrize(
        ("data", "keys", "said"),
        [
            ("nowhere", {}, "--data"),
            ("empty", {}, "--data"),
            ("mixed", {}, "(got json, text)"),
            ("mixed", {"data_files": ["*.md"]}, "['*.md']"),
            ("mixed", {"data_files": ["/x"]}, "--data-files"),
        ],
    )
    def test_what_is_refused_before_anything_is_read(self, tmp_path, data, keys, said):
        (tmp_path / "empty").mkdir()
        fill(tmp_path / "mixed", "a.py", "b.json")
        with pytest.raises(BuildError) as caught:
            find_files(Recipe.of(data=str(tmp_path / data), **keys))
        assert said in str(caught.value)


class TestRows:
    @pytest.mark.parametrize(
        ("row", "keys", "said"),
        [
            ("x", {"column": "txt"}, "'text'?"),
            (3, {}, "document 0: column 'text'"),
            ("x", {"messages": "text"}, "(got 'x')"),
            (["x"], {"messages": "text"}, "role and content"),
            ([{"role": "user", "content": 3}], {"messages": "text"}, "'content': 3"),
        ],
    )
    def test_rows_that_are_wrong(self, tmp_path, row, keys, said):
        with pytest.raises(BuildError) as caught:
            read(write(tmp_path / "a.jsonl", [row]), **keys)
        assert said in str(caught.value)

    def test_a_hub_id_goes_through_load_dataset(self, monkeypatch):
        import datasets

        rows = datasets.IterableDataset.from_generator(lambda: ({"text": t} for t in TEXTS))
        load = Mock(return_value=rows)
        monkeypatch.setattr(datasets, "load_dataset", load)
        keys = {"revision": "abc", "split": "test", "data_files": ["x/*"]}
        assert read("owner/name", config_name="plain", **keys) == TEXTS
        load.assert_called_once_with("owner/name", name="plain", streaming=True, **keys)
        load.side_effect = ZeroDivisionError("division by zero")
        with pytest.raises(BuildError, match="division by zero"):
            read("owner/name")

    def test_without_datasets_the_extra_is_named(self, tmp_path, monkeypatch):
        path = write(tmp_path / "rows.jsonl", TEXTS)
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(BuildError, match="datasets"):
            read(path)
        (tmp_path / "plain.txt").write_text("no need of it")
        assert read(tmp_path / "plain.txt") == ["no need of it"]


class TestTokens:
    @pytest.fixture
    def decoded(self, tokenizer):
        """What documents come out as, as text again."""

        def texts(documents, **keys):
            found = encode(documents, Recipe.of(data="d", **keys), tokenizer)
            return [None if ids is None else tokenizer.decode(ids) for ids in found]

        return texts

    def test_texts_and_ids_stand_for_themselves(self, decoded, tokenizer):
        ids = np.array(tokenizer("x y")["input_ids"])
        assert decoded(["ab\n", "", None, ids, "c d"]) == ["ab\n", None, None, "x y", "c d"]

    def test_conversations_go_through_the_template(self, decoded, tokenizer, monkeypatch):
        said = "<|user|>say a<|assistant|>a<|eos|>"
        talk = {"messages": "talk"}
        assert decoded([[ASK, ANSWER], [], [ASK]], **talk) == [said, None, "<|user|>say a"]
        assert decoded([[ASK, ANSWER]], **talk, chat_template=False) == ["say a\n\na"]
        template = "{% if messages|length > 1 %}{{ raise_exception('too many') }}{% endif %}ok"
        monkeypatch.setattr(tokenizer, "chat_template", template)
        assert decoded([[ASK, ANSWER], [ASK]], **talk) == [None, "ok"]

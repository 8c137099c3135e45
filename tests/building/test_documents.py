"""The same documents in the same order from every format; what is wrong with a row is said."""

import bz2
import csv
import gzip
import json
import lzma
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.building import documents
from selfspec.building.documents import find_inputs, read_documents, read_plain
from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError

pytestmark = pytest.mark.usefixtures("loads_datasets")

TEXTS = ["one\ntwo", 'three, "four"', "fünf\tsechs"]
PLAIN = "one\ntwo\n\nthree\n  \n\nfour é\n"


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
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, delimiter="," if kind == "csv" else "\t")
            writer.writerows([[column], *([row] for row in rows)])
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


# -- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv", "a.parquet"])
def test_every_format_gives_the_same(tmp_path, name):
    path = write(tmp_path / name, TEXTS, "body")
    assert read(path, column="body") == TEXTS
    assert read(tmp_path, column="body", max_documents=2) == TEXTS[:2]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.ndjson.zst", "json"), ("a.tsv.xz", "tsv"), ("a.py", "text"), ("v1.2.notes", "text")],
)
def test_the_kind_of_a_file(tmp_path, name, kind):
    fill(tmp_path, name)
    inputs = find_inputs(Recipe.of(data=str(tmp_path / name)))
    assert (inputs.source, inputs.files) == (kind, [str(tmp_path / name)])


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(tmp_path):
    fill(tmp_path, "b/c.txt", "a.txt", "b/a.md", ".git/x", "b/.hidden")
    found = find_inputs(Recipe.of(data=str(tmp_path))).files
    assert found == [str(tmp_path / name) for name in ("a.txt", "b/a.md", "b/c.txt")]
    some = find_inputs(Recipe.of(data=str(tmp_path), data_files=["*.txt", "b/*.md"])).files
    assert len(some) == 2


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("document", [PLAIN]),
        ("line", ["one", "two", None, "three", "  ", None, "four é"]),
        ("paragraph", ["one\ntwo\n", "three\n", "four é\n"]),
    ],
)
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_plain_text(tmp_path, form, expected, suffix, pack):
    path = tmp_path / f"notes.txt{suffix}"
    path.write_bytes(pack(PLAIN.encode()))
    assert read(path, form=form) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text("ab\né ", max_size=60), piece=st.integers(1, 20))
def test_pieces_of_a_long_file_add_up_to_it(tmp_path, monkeypatch, text, piece):
    monkeypatch.setattr(documents, "_PIECE", piece)
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    assert "".join(read_plain(str(path), "document")) == text
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    monkeypatch.undo()
    assert "".join(read_plain(str(path), "paragraph")) == "".join(lines)


def test_pictures_give_nothing_and_what_is_not_utf8_is_replaced(tmp_path):
    (tmp_path / "a.png").write_bytes(b"PNG\0\0\1")
    (tmp_path / "old.txt").write_bytes(b"caf\xe9 noir")
    assert read(tmp_path) == ["caf� noir"]


def test_token_ids_are_taken_as_they_are(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"ids": [3, 1]}\n{"ids": [4]}\n')
    assert [each.tolist() for each in read(tmp_path / "answers.jsonl", column="ids")] == [
        [3, 1],
        [4],
    ]


# -- rows --------------------------------------------------------------------------------------


def test_empty_rows_count(tmp_path):
    assert read(write(tmp_path / "a.jsonl", ["x", "", None, "y"])) == ["x", None, None, "y"]


@pytest.mark.parametrize(
    ("keys", "roles"),
    [(("role", "content"), ("user", "assistant")), (("from", "value"), ("human", "gpt"))],
)
def test_messages_of_both_fashions(tmp_path, keys, roles):
    rows = [[dict(zip(keys, (role, f"{role}!"), strict=True)) for role in roles], []]
    first, second = read(write(tmp_path / "a.jsonl", rows, "talk"), messages="talk")
    assert [message["role"] for message in first] == ["user", "assistant"]
    assert [message["content"] for message in first] == [f"{role}!" for role in roles]
    assert second is None


def test_a_file_that_mixes_prompts_and_messages_loses_none(tmp_path):
    rows = [
        {"prompt": "a"},
        {"messages": [{"role": "user", "content": "b"}]},
        {"prompt": "c", "messages": None},
        {"prompt": ""},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(path, column="prompt", learn_from="generations")
    assert found == ["a", [{"role": "user", "content": "b"}], "c", None]


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (["x"], {"column": "txt"}, "unknown column 'txt'; did you mean 'text'?"),
        (["x"], {"messages": "talk"}, "unknown column 'talk'"),
        ([3], {}, "document 0: column 'text' must hold texts or lists of token ids (got 3)"),
        (["x"], {"messages": "text"}, "column 'text' must hold lists of messages (got 'x')"),
        ([["x"]], {"messages": "text"}, "a message must be a table with role and content"),
        ([[{"role": "user", "content": 3}]], {"messages": "text"}, "content must be text (got 3)"),
        ([[{"role": "Doctor", "content": "x"}]], {"messages": "text"}, "unknown role 'Doctor'"),
    ],
)
def test_rows_that_are_wrong(tmp_path, rows, keys, message):
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(BuildError) as caught:
        read(path, **keys)
    assert message in str(caught.value)


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
def test_files_that_are_broken(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BuildError, match="can't be read"):
        read(tmp_path / name)


# -- what is refused before anything is read ---------------------------------------------------


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        ("{}/nowhere", {}, "--data must be a file or folder that exists, or a Hub id"),
        ("./nowhere", {}, "--data must be a file or folder that exists, or a Hub id"),
        ("a b", {}, "--data must be a file or folder that exists"),
        ("{}/empty", {}, "--data must be a folder with files (got"),
        ("{}/mixed", {}, "--data must hold files of one kind (got json, text); choose some with"),
        ("{}/mixed", {"data_files": ["*.md"]}, "a folder with files that match ['*.md']"),
        ("{}/mixed", {"data_files": ["/x"]}, "--data-files must be globs inside --data"),
        ("{}/mixed", {"data_files": ["*.py"], "split": "test"}, "--split must be train"),
        ("{}/mixed/a.py", {"messages": "talk"}, "--messages must be read from rows"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, data, keys, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "mixed", "a.py", "b.json")
    with pytest.raises(BuildError) as caught:
        find_inputs(Recipe.of(data=data.format(tmp_path), **keys))
    assert message in str(caught.value)


# -- the Hub -----------------------------------------------------------------------------------


def test_a_hub_id_goes_through_load_dataset(monkeypatch):
    import datasets

    asked = {}

    def load_dataset(path, **arguments):
        asked.update(path=path, **arguments)
        return datasets.IterableDataset.from_generator(lambda: ({"text": t} for t in TEXTS))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    keys = {"config_name": "plain", "revision": "abc", "split": "test", "data_files": ["x/*.json"]}
    assert read("owner/name", **keys) == TEXTS
    assert asked == {
        "path": "owner/name",
        "name": "plain",
        "revision": "abc",
        "data_files": ["x/*.json"],
        "split": "test",
        "streaming": True,
    }


def test_a_hub_that_is_not_there_is_said(monkeypatch):
    import datasets

    def load_dataset(*_, **_arguments):
        raise ConnectionError("couldn't reach 'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(BuildError, match="couldn't reach"):
        read("owner/name")


def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", TEXTS)
    for name in [name for name in sys.modules if name.split(".")[0] == "datasets"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BuildError, match="pip install datasets"):
        read(path)
    (tmp_path / "plain.txt").write_text("no need of it")
    assert read(tmp_path / "plain.txt") == ["no need of it"]

"""The same documents in the same order from every format; what is wrong with a row is said."""

import csv
import gzip
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.building.documents import read_documents
from selfspec.building.inputs import find_inputs, num_documents
from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError

pytestmark = pytest.mark.usefixtures("loads_datasets")

TEXTS = ["one\ntwo", 'three, "four"', "fünf\tsechs"]


def read(data, skip=0, **keys):
    recipe = Recipe.of(name="n", data=str(data), **keys)
    return list(read_documents(recipe, find_inputs(recipe), skip))


def extent(data, **keys):
    recipe = Recipe.of(name="n", data=str(data), **keys)
    return num_documents(recipe, find_inputs(recipe))


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
        packed = gzip.compress(text.encode()) if kind.endswith("gz") else text.encode()
        path.write_bytes(packed)
    return path


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv", "a.parquet"])
def test_every_format_gives_the_same(tmp_path, name):
    path = write(tmp_path / name, TEXTS, "body")
    assert read(path, column="body") == TEXTS
    assert read(tmp_path, column="body") == TEXTS
    assert read(path, column="body", max_documents=2) == TEXTS[:2]
    assert read(path, 1, column="body", max_documents=2) == TEXTS[1:2]
    assert read(path, 2, column="body", max_documents=2) == []
    assert extent(path, column="body") in (3, 4, 5, None)  # lines of a CSV are no rows


def test_several_files_of_a_builder(tmp_path):
    for place, text in enumerate(TEXTS):
        write(tmp_path / f"{place}.jsonl", [text])
    assert read("json", data_files=[f"{tmp_path}/*.jsonl"]) == TEXTS
    assert extent(tmp_path) == 3


def test_a_folder_of_texts_is_a_document_a_file(tmp_path):
    for place, text in enumerate(TEXTS):
        (tmp_path / f"{place}.txt").write_text(text, encoding="utf-8")
    assert read(tmp_path) == TEXTS
    assert read(tmp_path, 2) == TEXTS[2:]
    assert read("text", data_files=[f"{tmp_path}/*.txt"], form="line")[:2] == ["one", "two"]
    assert extent(tmp_path) == 3
    assert extent(tmp_path, max_documents=2) == 2
    assert extent(tmp_path, form="paragraph") is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(skip=st.integers(0, 6), limit=st.none() | st.integers(1, 6))
def test_skipping_is_slicing(tmp_path, skip, limit):
    path = tmp_path / "lines.txt"
    path.write_text("a\n\nb\nc\n")
    everything = ["a", None, "b", "c"]
    assert read(path, skip, form="line", max_documents=limit) == everything[:limit][skip:]


def test_empty_rows_count(tmp_path):
    path = write(tmp_path / "a.jsonl", ["x", "", None, "y"])
    assert read(path) == ["x", None, None, "y"]


@pytest.mark.parametrize(
    ("keys", "roles"),
    [(("role", "content"), ("user", "assistant")), (("from", "value"), ("human", "gpt"))],
)
def test_messages_of_both_fashions(tmp_path, keys, roles):
    rows = [[dict(zip(keys, (role, f"{role}!"), strict=True)) for role in roles], []]
    path = write(tmp_path / "a.jsonl", rows, "talk")
    first, second = read(path, messages="talk")
    assert [message["role"] for message in first] == ["user", "assistant"]
    assert [message["content"] for message in first] == [f"{role}!" for role in roles]
    assert second is None


def test_roles_of_ones_own(tmp_path):
    path = write(tmp_path / "a.jsonl", [[{"role": "Doctor", "content": "hm"}]], "talk")
    with pytest.raises(BuildError, match=r"document 0: unknown role 'Doctor'.*--roles human=user"):
        read(path, messages="talk")
    (document,) = read(path, messages="talk", roles={"Doctor": "assistant"})
    assert document == [{"role": "assistant", "content": "hm"}]


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (["x"], {"column": "txt"}, "unknown column 'txt'; did you mean 'text'?"),
        (["x"], {"messages": "talk"}, "unknown column 'talk'"),
        ([3], {}, "document 0: column 'text' must hold texts (got 3)"),
        (["x"], {"messages": "text"}, "column 'text' must hold lists of messages (got 'x')"),
        ([["x"]], {"messages": "text"}, "a message must be a table with role and content"),
        ([[{"role": "user", "content": 3}]], {"messages": "text"}, "content must be text (got 3)"),
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
    ],
)
def test_files_that_are_broken(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BuildError, match="can't be read"):
        read(tmp_path / name)


def test_a_hub_id_goes_through_load_dataset(tmp_path, monkeypatch):
    import datasets

    asked = {}

    def load_dataset(**arguments):
        asked.update(arguments)
        return datasets.IterableDataset.from_generator(lambda: ({"text": t} for t in TEXTS))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    keys = {"config_name": "plain", "revision": "abc", "split": "test", "data_files": ["x/*.json"]}
    assert read("owner/name", 1, **keys) == TEXTS[1:]
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

    def load_dataset(**_arguments):
        raise ConnectionError("couldn't reach 'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(BuildError, match="couldn't reach"):
        read("owner/name")


def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", TEXTS)
    for name in [name for name in sys.modules if name.split(".")[0] == "datasets"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BuildError, match=r"pip install datasets"):
        read(path)
    (tmp_path / "plain.txt").write_text("no need of it")
    assert read(tmp_path / "plain.txt") == ["no need of it"]

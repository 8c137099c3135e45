"""From the name of the data to files of one kind in order, or to a name for `datasets`."""

import os

import pytest

from selfspec.building.inputs import find_inputs
from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError


def inputs(data, **keys):
    return find_inputs(Recipe.of(name="n", data=str(data), **keys))


def fill(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.json", "json"),
        ("a.jsonl.gz", "json"),
        ("a.ndjson.zst", "json"),
        ("a.csv", "csv"),
        ("a.tsv.xz", "tsv"),
        ("a.parquet", "parquet"),
        ("a.arrow", "arrow"),
        ("a.txt", "text"),
        ("a.py", "text"),
        ("a.txt.gz", "text"),
        ("Makefile", "text"),
        ("v1.2.notes", "text"),
    ],
)
def test_the_kind_of_a_file(tmp_path, name, kind):
    fill(tmp_path, name)
    assert inputs(tmp_path / name).kind == kind
    assert inputs(tmp_path / name).files == (tmp_path / name,)


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(tmp_path):
    fill(tmp_path, "b/c.txt", "a.txt", "b/a.md", ".git/x", "b/.hidden")
    found = inputs(tmp_path)
    assert found.kind == "text"
    assert [str(p.relative_to(tmp_path)) for p in found.files] == ["a.txt", "b/a.md", "b/c.txt"]


def test_globs_narrow_a_folder(tmp_path):
    fill(tmp_path, "a.py", "b.json", "c/d.py", "c/e.txt")
    assert len(inputs(tmp_path, data_files=["**/*.py"]).files) == 2
    assert len(inputs(tmp_path, data_files=["*.py", "c/*"]).files) == 3


def test_a_readme_beside_data_is_no_data(tmp_path):
    fill(tmp_path, "README.md", "LICENSE", "x.jsonl", "y.jsonl")
    found = inputs(tmp_path)
    assert found.kind == "json"
    assert [path.name for path in found.files] == ["x.jsonl", "y.jsonl"]


def test_builders_take_globs_and_addresses(tmp_path):
    fill(tmp_path, "a.dat", "b.dat", "c/d.dat")
    assert len(inputs("json", data_files=[f"{tmp_path}/**/*.dat"]).files) == 3
    far = inputs("json", data_files=["hf://datasets/owner/name/x.json"])
    assert far.files == ()
    assert far.addresses == ("hf://datasets/owner/name/x.json",)


@pytest.mark.parametrize("name", ["owner/name", "name", "own-er/na.me_2"])
def test_hub_ids(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inputs(name, split="validation").kind == "hub"


def test_the_fingerprint_tells_changed_files(tmp_path):
    fill(tmp_path, "a.txt", "b.txt")
    before = inputs(tmp_path).fingerprint()
    assert inputs(tmp_path).fingerprint() == before
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert inputs(tmp_path).fingerprint() != before


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        ("{}/nowhere", {}, "data must be a file or folder that exists, a Hub id"),
        ("./nowhere", {}, "data must be a file or folder that exists, a Hub id"),
        ("a b", {}, "data must be a file or folder that exists"),
        ("{}/empty", {}, "data folder must hold files (got"),
        ("{}/mixed", {}, "data files must be of one kind (got json, text); choose with data_files"),
        ("{}/mixed", {"data_files": ["*.md"]}, "data folder must hold files that match ['*.md']"),
        ("{}/mixed", {"data_files": ["/x"]}, "data_files must be globs inside the data folder"),
        ("{}/mixed", {"data_files": ["*.py"], "split": "test"}, "split must be 'train'"),
        ("json", {}, "data 'json' must come with data_files"),
        ("json", {"data_files": ["{}/x*"]}, "data_files must name files that exist (got"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, data, keys, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "mixed", "a.py", "b.json")
    keys = {k: [g.format(tmp_path) for g in v] if k == "data_files" else v for k, v in keys.items()}
    with pytest.raises(BuildError) as caught:
        inputs(data.format(tmp_path), **keys)
    assert message in str(caught.value)

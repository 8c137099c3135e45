"""Edits of library classes, and the bench that lets them pass."""

from __future__ import annotations

import ast
import re
import shutil

import pytest

from eval import predict
from eval.benches.edits import Edit, stdlib_edits
from eval.models.tiny_corpus import stdlib_folder

MODULES = ("argparse", "ast", "mailbox", "multiprocessing/managers", "subprocess", "threading")
MODULES += ("unittest/case", "zipfile")


@pytest.fixture(scope="module")
def edits(tmp_path_factory):
    """Of modules that have such classes in every Python, and of some that have none."""
    folder = tmp_path_factory.mktemp("library")
    for name in MODULES:
        shutil.copy(stdlib_folder() / f"{name}.py", folder)
    return stdlib_edits(3, folder)


def test_what_comes_of_an_edit_is_code_again(edits):
    for edit in edits:
        before, after = ast.parse(edit.before), ast.parse(edit.after)
        assert ast.dump(before) != ast.dump(after)
        assert edit.before.startswith("class ")


def test_a_name_changes_wherever_it_stands(edits):
    for edit in edits[::3]:
        name, new_name = re.fullmatch(r"Rename (\w+) to (\w+)\.", edit.order).groups()
        assert re.sub(rf"\b{new_name}\b", name, edit.after) == edit.before
        assert edit.after.count(new_name) >= 5


def test_inserted_and_deleted_lines(edits):
    for edit in (*edits[1::3], *edits[2::3]):
        before, after = edit.before.splitlines(), edit.after.splitlines()
        shorter, longer = sorted((before, after), key=len)
        assert len(shorter) < len(longer)
        assert (shorter is after) is (edit.task == "delete")
        lines = iter(longer)
        assert all(line in lines for line in shorter), "the other lines keep their order"


@pytest.mark.parametrize("hide", [pytest.param(True, marks=pytest.mark.slow), False])
def test_all_methods_write_the_forced_answers(plain_folder, figures, monkeypatch, hide):
    before = "class Hare:\n" + "    def run(self):\n        return self.legs\n\n" * 4
    edit = Edit("insert", before, "Insert a docstring.", before + '    """Runs."""\n')
    monkeypatch.setattr(predict, "stdlib_edits", lambda number: [edit] * 3 * number)
    asked = ["--model", plain_folder, "--classes", "1", "--budget", "fixed", "--max-nodes", "8"]
    told = figures("predict", *asked, *["--hide"] * hide)
    overall = {name: by_task["overall"] for name, by_task in told["methods"].items()}
    assert overall["stock"]["tokens_per_step"] == 1
    assert overall["stock"]["speed_up"] == 1
    assert overall["with a prediction"]["tokens_per_step"] > 4
    if hide:
        assert overall["selfspec"]["tokens_per_step"] < 4

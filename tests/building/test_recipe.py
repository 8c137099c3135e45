"""A recipe refuses what it can't have by name, rule, value got and fix, before any work."""

import pytest

from selfspec.building.recipe import Recipe, read_recipe
from selfspec.errors import BuildError

GOOD = {"name": "notes", "data": "notes"}


def said(**keys):
    with pytest.raises(BuildError) as caught:
        Recipe.of(**{**GOOD, **keys})
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_cont": 3}, "unknown recipe key 'min_cont'; did you mean 'min_count'?"),
        ({"min_count": 0}, "min_count must be >= 1 (got 0)"),
        ({"min_count": True}, "min_count must be a whole number (got True)"),
        ({"max_prefix": 9}, "max_prefix must be <= 8 (got 9)"),
        ({"max_documents": "3"}, "max_documents must be a whole number (got '3')"),
        ({"warmup_tokens": -1}, "warmup_tokens must be >= 0 (got -1)"),
        ({"temperature": -0.1}, "temperature must be a number in [0, 100) (got -0.1)"),
        ({"temperature": float("nan")}, "temperature must be a number in [0, 100) (got nan)"),
        ({"build": "ngram"}, "unknown what to build 'ngram'; did you mean 'ngrams'?"),
        ({"learn_from": "texts"}, "did you mean 'text'?"),
        ({"data": "vocabulary"}, "build must be 'lut' and learn_from 'text' with data = 'vocab"),
        ({"form": "page"}, "unknown form of a document 'page'"),
        ({"max_size": "64 apples"}, "or text such as '2GB', '64M' or '500MiB' (got '64 apples'"),
        ({"max_size": "1KB"}, "max_size must be >= 10KB (got 1000)"),
        ({"chat_template": "yes"}, "chat_template must be true or false (got 'yes')"),
        ({"column": ""}, "column must be a text that is not empty (got '')"),
        ({"split": 3}, "split must be a text that is not empty (got 3)"),
        ({"data_files": 7}, "data_files must be a list of globs (got 7)"),
        ({"data_files": [""]}, "data_files must be a text that is not empty"),
        ({"roles": ["human"]}, "roles must be a table of names"),
        ({"roles": {"human": 1}}, "roles.human must be a text that is not empty (got 1)"),
        ({"data": "FILL-IN/folder"}, "data must be filled in"),
        ({"data": None}, "a recipe must have a data; write it in, or pass --data"),
    ],
)
def test_what_a_recipe_refuses(keys, message):
    assert message in said(**keys)


def test_changed_keys_make_the_same_recipe():
    recipe = Recipe.of(**GOOD, data_files="*.txt", roles={"me": "user"}, max_size="1MB", seed=3)
    keys = recipe.changed_keys()
    assert set(keys) == {"name", "data", "data_files", "roles", "max_size", "seed"}
    assert Recipe.of(**keys) == recipe


def test_reading_a_file(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('name = "n"\ndata = "d"\n[roles]\nhuman = "user"\n')
    assert Recipe.of(**read_recipe(path)).roles == {"human": "user"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"name = ", "must be TOML"), (b"\xff", "must be UTF-8 text"), (None, "a readable file")],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuildError, match=message):
        read_recipe(path)

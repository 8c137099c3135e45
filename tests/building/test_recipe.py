"""A recipe refuses what it can't have by option, rule, value got and fix, before any work."""

import pytest

from selfspec.building.recipe import Recipe, read_recipe, recipe_names
from selfspec.errors import BuildError

GOOD = {"name": "notes", "data": "notes"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_cont": 3}, "unknown recipe key 'min_cont'; did you mean 'min_count'?"),
        ({"min_count": 0}, "--min-count must be greater than or equal to 1 (got 0)"),
        ({"min_count": True}, "--min-count must be a valid integer (got True)"),
        ({"max_prefix": 9}, "--max-prefix must be less than or equal to 8 (got 9)"),
        ({"max_documents": "3"}, "--max-documents must be a valid integer (got '3')"),
        ({"warmup_tokens": -1}, "--warmup-tokens must be greater than or equal to 0 (got -1)"),
        ({"temperature": float("nan")}, "--temperature must be a finite number (got nan)"),
        ({"build": "ngram"}, "--build must be 'both', 'lut' or 'ngrams' (got 'ngram')"),
        ({"data": "vocabulary"}, "--build must be lut and --learn-from text with --data vocab"),
        ({"max_size": "64 apples"}, "--max-size must be a number of bytes"),
        ({"max_size": "1KB"}, "--max-size must be >= 13KB (got 1KB)"),
        ({"chat_template": "yes"}, "--chat-template must be a valid boolean (got 'yes')"),
        ({"column": ""}, "--column must have at least 1 character (got '')"),
        ({"data_files": 7}, "--data-files must be a valid list (got 7)"),
        ({"data": None}, "--data must name what to read"),
        ({"data": 3}, "--data must be a valid string (got 3)"),
    ],
)
def test_what_a_recipe_refuses(keys, message):
    with pytest.raises(BuildError) as caught:
        Recipe.of(**{**GOOD, **keys})
    assert message in str(caught.value)


def test_a_cache_is_named_after_its_data():
    assert Recipe.of(data="owner/texts").name == "texts"
    assert Recipe.of(data="owner/texts", data_files="*.txt").data_files == ["*.txt"]


@pytest.mark.parametrize("name", recipe_names())
def test_the_recipes_that_come_with_selfspec(name):
    keys = {"data": "filled-in", **read_recipe(name)}
    assert Recipe.of(**keys).name == keys["name"]


def test_there_is_a_recipe_for_each_use():
    assert recipe_names() == ["code", "dialogue", "folder", "oanc", "own-answers", "vocabulary"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"name = ", "must be TOML"), (b"\xff", "must be UTF-8 text"), (None, "a readable file")],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuildError, match=message):
        read_recipe(str(path))


def test_a_name_that_no_recipe_has():
    with pytest.raises(BuildError, match="unknown recipe 'own-answer'; did you mean 'own-answers'"):
        read_recipe("own-answer")

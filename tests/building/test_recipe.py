"""A recipe refuses what it can't have by option, rule, value got and fix, before any work."""

import pytest

from selfspec.building.recipe import OPTIONS, Recipe, read_recipe, recipe_names
from selfspec.errors import BuildError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"min_cont": 3}, "unknown recipe key 'min_cont'; did you mean 'min_count'?"),
        ({"min_count": 0}, "min_count must be greater than or equal to 1 (got 0)"),
        ({"min_count": True}, "min_count must be a valid integer (got True)"),
        ({"max_documents": "3"}, "--max-documents must be a valid integer (got '3')"),
        ({"temperature": float("nan")}, "--temperature must be a finite number (got nan)"),
        ({"build": "ngram"}, "--build must be 'both', 'lut' or 'ngrams' (got 'ngram')"),
        ({"data": "vocabulary"}, "--data vocabulary must come with --build lut"),
        ({"max_size": "64 apples"}, "max_size must be a number of bytes"),
        ({"max_size": "1KB"}, "max_size must be >= 9KB (got 1KB)"),
        ({"data_files": "*.txt"}, "--data-files must be a valid list (got '*.txt')"),
        ({"data": None}, "--data must name what to read"),
        ({"data": ""}, "--data must have at least 1 character (got '')"),
    ],
)
def test_what_a_recipe_refuses(keys, message):
    with pytest.raises(BuildError) as caught:
        Recipe.of(**{"name": "notes", "data": "notes", **keys})
    assert message in str(caught.value)


def test_a_cache_is_named_after_its_data():
    assert Recipe.of(data="owner/texts").name == "texts"


def test_the_recipes_that_come_with_selfspec():
    names = ["code", "dialogue", "folder", "oanc", "own-answers", "vocabulary"]
    assert recipe_names() == names
    for name in names:
        keys = read_recipe(name)
        assert Recipe.of(**{"data": "filled-in", **keys}).name == keys["name"]
    assert set(OPTIONS) <= set(Recipe.model_fields)


@pytest.mark.parametrize("content", [b"name = ", b"\xff", None])
def test_files_that_are_no_recipe(tmp_path, content):
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuildError, match="--recipe must be a readable TOML file"):
        read_recipe(str(path))


def test_a_name_that_no_recipe_has():
    with pytest.raises(BuildError, match="unknown recipe 'own-answer'; did you mean 'own-answers'"):
        read_recipe("own-answer")

"""A recipe refuses what it can't have by option, rule, value got and fix, before any work."""

import pytest

from selfspec.building.recipe import Recipe, read_recipe, recipe_names
from selfspec.errors import BuildError


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"windw": 3}, "'window'?"),
        ({"window": 0}, "window"),
        ({"window": True}, "window"),
        ({"max_documents": "3"}, "max_documents"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
        ({"build": "ngram"}, "build must"),
        ({"data": "vocabulary"}, "--build lut"),
        ({"max_prefix": 4}, "recipe key 'max_prefix'"),
        ({"data_files": "*.txt"}, "data_files"),
        ({"data": None}, "--data"),
        ({"data": ""}, "data must"),
    ],
)
def test_what_a_recipe_refuses(keys, name):
    with pytest.raises(BuildError) as caught:
        Recipe.of(**{"name": "notes", "data": "notes", **keys})
    assert name in str(caught.value)


def test_a_cache_is_named_after_its_data():
    assert Recipe.of(data="owner/texts").name == "texts"


def test_the_recipes_that_come_with_selfspec():
    names = ["code", "dialogue", "folder", "own-answers", "vocabulary"]
    assert recipe_names() == names
    for name in names:
        keys = read_recipe(name)
        assert Recipe.of(**{"data": "filled-in", **keys}).name == keys["name"]


@pytest.mark.parametrize("content", [b"name = ", b"\xff", None])
def test_files_that_are_no_recipe(tmp_path, content):
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BuildError, match="--recipe"):
        read_recipe(str(path))
    with pytest.raises(BuildError, match=r"'own-answers'\?"):
        read_recipe("own-answer")

"""`selfspec cache build`: options and recipes, mistakes in one line, and the script beside it."""

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from selfspec.building.recipe import Recipe, read_recipe
from selfspec.cli.cache.recipe_options import RecipeOptions, recipe_of
from selfspec.errors import BuildError
from tests.tiny import LINES

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "caches" / "recipes").glob("*.toml"))
FEW = ("--window", "16", "--batch", "2")


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for place, line in enumerate(LINES):
        (folder / f"{place}.txt").write_text(line * 2)
    return folder


def card(folder):
    return json.loads((folder / "cache.json").read_text())


@pytest.fixture
def build(run, plain_folder, tmp_path):
    def build(*args):
        return run("cache", "build", plain_folder, tmp_path / "cache", *FEW, *args)

    return build


@pytest.fixture
def refused(fails, plain_folder, tmp_path):
    return lambda *args: fails("cache", "build", plain_folder, tmp_path / "cache", *args)


def test_options_and_recipe_have_the_same_keys():
    options = {each.name for each in dataclasses.fields(RecipeOptions)}
    assert options == {each.name for each in dataclasses.fields(Recipe)}


def test_a_folder_of_texts(build, texts, tmp_path):
    result = build("--data", texts)
    assert result.exit_code == 0
    assert "n-gram prefixes" in result.stdout
    about = card(tmp_path / "cache")["about"]
    assert about["name"] == "texts"
    assert about["documents"] == 3
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "cache.json",
        "corpus.safetensors",
        "lut.safetensors",
    ]


def test_own_answers(build, tmp_path):
    (tmp_path / "prompts.txt").write_text("the quick\ndef read\n")
    own = ("--learn-from", "generations", "--max-new-tokens", "5", "--no-chat-template")
    result = build("--data", tmp_path / "prompts.txt", "--form", "line", *own)
    assert result.exit_code == 0
    assert card(tmp_path / "cache")["about"]["answers"] == 2


def test_options_replace_the_keys_of_a_recipe(build, texts, tmp_path):
    (tmp_path / "r.toml").write_text('name = "n"\ndata = "FILL-IN"\nbuild = "lut"\nmin_count = 4\n')
    build("--recipe", tmp_path / "r.toml", "--data", texts, "--build", "ngrams")
    about = card(tmp_path / "cache")["about"]
    assert about["name"] == "n"
    assert (about["recipe"]["build"], about["recipe"]["min_count"]) == ("ngrams", 4)


def test_the_card_names_the_command(build, texts, tmp_path):
    build("--data", texts, "--build", "ngrams", "--max-memory", "1MB", "--roles", "me=user")
    command = card(tmp_path / "cache")["about"]["command"]
    keys = f"--data {texts.name} --roles me=user --build ngrams --window 16 --batch 2"
    assert command.endswith(keys)
    assert "memory" not in command


def test_ctrl_c_says_how_to_go_on(build, texts, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("selfspec.building.counting.Counting.tables", interrupted)
        result = build("--data", texts, "--build", "ngrams")
    assert result.exit_code == 130
    assert "run the same command again to go on" in result.stderr
    assert not (tmp_path / "cache").exists()
    assert build("--data", texts, "--build", "ngrams").exit_code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--data must name what to read"),
        (("--name", "n"), "--data must name what to read"),
        (("--data", "./nowhere"), "data must be a file or folder that exists"),
        (("--data", "{texts}", "--min-count", "0"), "min_count must be >= 1 (got 0)"),
        (("--data", "{texts}", "--build", "ngram"), "did you mean 'ngrams'?"),
        (("--data", "{texts}", "--max-memory", "lots"), "--max-memory must be a number of bytes"),
        (("--data", "{texts}", "--roles", "human"), "--roles must be data=template"),
        (("--data", "{texts}", "--split", "test"), "split must be 'train'"),
        (("--data", "{texts}", "--recipe", "{texts}/none.toml"), "must be a readable file"),
        (("--data", "{texts}", "--recipe", "{texts}/0.txt"), "must be TOML"),
        (("--data", "{texts}", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("--data", "{texts}", "--learn-from", "generations"), "pass --no-chat-template"),
        (("--data", "{texts}", "--messages", "talk"), "messages must be read from"),
    ],
)
def test_mistakes_are_answered_in_a_line(refused, texts, tmp_path, args, said):
    assert said in refused(*(arg.format(texts=texts) for arg in args))
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "cache.building").exists()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of the reader's own
def test_a_column_that_is_not_there(refused, tmp_path):
    (tmp_path / "rows.csv").write_text("text\nx\n")
    assert "did you mean 'text'?" in refused("--data", tmp_path / "rows.csv", "--column", "txt")
    gc.collect()


def test_a_folder_that_is_taken(refused, texts, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine").write_text("x")
    assert "must be free" in refused("--data", texts)
    assert "'mine'" in refused("--data", texts, "--overwrite")


@pytest.mark.slow
def test_the_script_is_the_command(texts, tmp_path, plain_folder):
    command = [sys.executable, ROOT / "caches" / "build.py", plain_folder, tmp_path / "cache"]
    options = ["--data", texts, "--build", "ngrams"]
    subprocess.run([*command, *options], check=True, cwd=tmp_path, capture_output=True)
    assert card(tmp_path / "cache")["about"]["documents"] == 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_are_sound(path):
    keys = tomllib.loads(path.read_text(encoding="utf-8"))
    Recipe.of(**{**keys, "data": keys["data"] if keys["data"] == "vocabulary" else "filled-in"})
    assert path.read_text(encoding="utf-8").startswith("#")
    if "FILL-IN" in keys["data"]:
        with pytest.raises(BuildError, match=r"data must be filled in .* --data"):
            recipe_of(path, RecipeOptions())


def test_there_is_a_recipe_for_each_use():
    names = " ".join(path.stem for path in RECIPES)
    assert names == "code dialogue folder oanc own-answers vocabulary"
    assert read_recipe(RECIPES[1])["roles"] == {"human": "user", "gpt": "assistant"}

"""The keys of a recipe as options of a command."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

from selfspec.building.recipe import BUILDS, FORMS, LEARN_FROM, Recipe, read_recipe
from selfspec.cli.shared.options import option
from selfspec.errors import CliError

# What each key means, by the headings of the command's help.
_PANELS = {
    "Data (what is read)": {
        "name": "Name on the cache's card. Default: that of the data.",
        "data": "A Hub id, a file, a folder, or json, csv, parquet, arrow or text with "
        "--data-files; vocabulary: no data.",
        "data_files": "Glob of the files to read; can be given again. Default: all of them.",
        "config_name": "Configuration of a Hub data set that has several.",
        "revision": "Branch, tag or commit of a Hub data set. A commit never changes.",
        "split": "Split of a Hub data set. Default: train.",
        "column": "Column that holds the text. Default: text.",
        "messages": "Column that holds conversations, to be read instead of a text column.",
        "roles": "Who speaks, as data=template, such as human=user; can be given again.",
        "form": f"A document in a plain text file: {', '.join(FORMS)}. Default: all of it.",
        "chat_template": "Put conversations and prompts through the tokenizer's template. "
        "Default: yes.",
        "licence": "Licence of the data, for the card.",
        "max_documents": "Read at most this number of documents. More: rarer n-grams, more time.",
    },
    "Tables (what is kept)": {
        "build": f"{', '.join(BUILDS)}. ngrams from text needs no model. Default: both.",
        "learn_from": f"{', '.join(LEARN_FROM)}: the model's answers, or the data. Default: text.",
        "max_prefix": "Longest prefix of an n-gram, 1 to 8. More: surer drafts. Default: 4.",
        "min_count": "Drop n-grams with a lower count. More: a smaller file. Default: 2.",
        "max_continuations": "Continuations kept for each prefix. More: a larger file. Default: 8.",
        "max_size": "Largest n-gram file; min_count is raised until it fits. Default: 64MB.",
    },
    "The model's reading and writing": {
        "warmup_tokens": "Tokens that the model reads for the LUTs; 0: all. Default: 1000000.",
        "window": "Tokens read at once. More: more context. Default: 256.",
        "batch": "Windows or prompts at once. More: faster, more memory. Default: 8.",
        "max_prompt_tokens": "Leave out longer prompts. Default: 1024.",
        "max_new_tokens": "The longest answer, in tokens. More: more text. Default: 256.",
        "temperature": "0: likeliest answers. Higher: more varied ones. Default: 0.",
        "seed": "For sampling: same seed, same answers. Default: 0.",
    },
}


class RecipeOptions(dict[str, Any]):
    """Every key of a `Recipe`, under its own name; None leaves it to the recipe or its default."""

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        """An option for each key. Lists are given item by item, and roles as data=template."""
        kinds = {**get_type_hints(Recipe), "data_files": list[str], "roles": list[str]}
        kinds["max_size"] = str
        shown = {"show_default": False}
        return [
            option(name, kinds[name] | None, None, help=each, rich_help_panel=panel, **shown)
            for panel, texts in _PANELS.items()
            for name, each in texts.items()
        ]

    def given(self) -> dict[str, Any]:
        """The keys that were set, as a recipe has them."""
        values = {name: value for name, value in self.items() if value not in (None, [])}
        if "roles" in values:
            values["roles"] = dict(_pair(each) for each in values["roles"])
        return values


def recipe_of(file: Path | None, options: RecipeOptions) -> Recipe:
    """The recipe in a file; options replace its keys."""
    keys = {**(read_recipe(file) if file else {}), **options.given()}
    if "data" not in keys:
        raise CliError("--data must name what to read: a file, a folder or a Hub id (got nothing)")
    if "name" not in keys and isinstance(keys.get("data"), str):
        keys["name"] = Path(keys["data"]).resolve().name
    return Recipe.of(**keys)


def _pair(text: str) -> tuple[str, str]:
    name, equals, role = text.partition("=")
    if not (name and equals and role):
        raise CliError(f"--roles must be data=template, such as human=user (got {text!r})")
    return name, role

"""The keys of a recipe as options of a command."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

from selfspec.building.recipe import KEYS, Recipe, read_recipe
from selfspec.cli.shared.options import option
from selfspec.errors import CliError


class RecipeOptions(dict[str, Any]):
    """Every key of a `Recipe`, under its own name; None leaves it to the recipe or its default."""

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        """An option for each key. Lists are given item by item, and roles as data=template."""
        kinds = {**get_type_hints(Recipe), "data_files": list[str], "roles": list[str]}
        kinds["max_size"] = str
        return [
            option(name, kinds[name] | None, None, help=each, rich_help_panel=panel)
            for panel, texts in KEYS.items()
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

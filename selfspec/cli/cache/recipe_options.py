"""The keys of a recipe as options of a command."""

from __future__ import annotations

import inspect
from typing import Any

from selfspec.building.recipe import Recipe, read_recipe
from selfspec.cli.shared.options import option

_PANEL = "Recipe: what is read, kept and written"
_KINDS = {"chat_template": bool, "data_files": list[str], "max_size": str, "temperature": float}


class RecipeOptions(dict[str, Any]):
    """Every key of a `Recipe`, under its own name; None leaves it to the recipe or its default."""

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        """An option for each key. Lists are given item by item."""
        return [
            option(name, _kind(name) | None, None, help=_help(name), rich_help_panel=_PANEL)
            for name in Recipe.model_fields
        ]

    def recipe(self, name_or_path: str | None) -> Recipe:
        """The recipe of this name or in this file; options replace its keys."""
        keys = read_recipe(name_or_path) if name_or_path else {}
        given = {name: value for name, value in self.items() if value not in (None, [])}
        return Recipe.of(**{**keys, **given})


def _kind(name: str) -> Any:
    default = Recipe.model_fields[name].default
    number = type(default) is int or name == "max_documents"
    return _KINDS.get(name, int if number else str)


def _help(name: str) -> str:
    field = Recipe.model_fields[name]
    told = field.is_required() or field.default in (None, [])
    return f"{field.description}{'' if told else f' Default: {field.default}.'}"

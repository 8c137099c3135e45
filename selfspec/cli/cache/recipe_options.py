"""The keys of a recipe as options of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from selfspec.building.recipe import KEYS, Recipe, read_recipe
from selfspec.cli.shared.options import record
from selfspec.errors import CliError

_KINDS = {"data_files": tuple[str, ...], "roles": tuple[str, ...], "max_size": str}


class _Given:
    def given(self) -> dict[str, Any]:
        """The keys that were set, as a recipe has them."""
        values = {name: value for name, value in vars(self).items() if value not in (None, ())}
        if "roles" in values:
            values["roles"] = dict(_pair(each) for each in values["roles"])
        return values


def _options() -> list[tuple[str, Any, Any]]:
    """An option for each key. Lists are given item by item, and roles as data=template.

    None leaves a key to the recipe or its default.
    """
    kinds = get_type_hints(Recipe) | _KINDS
    return [
        (
            name,
            Annotated[
                kinds[name] | None,
                Parameter(
                    help=text,
                    group=Group(panel),
                    negative=None if kinds[name] is bool else (),
                ),
            ],
            None,
        )
        for panel, texts in KEYS.items()
        for name, text in texts.items()
    ]


if TYPE_CHECKING:
    RecipeOptions = _Given
else:
    RecipeOptions = record("RecipeOptions", _options(), _Given)


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

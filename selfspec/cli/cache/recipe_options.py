"""The keys of a recipe as options of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from selfspec.building.recipe import Recipe, read_recipe
from selfspec.cli.shared.options import record

_PANEL = Group("Recipe: what is read, kept and written", sort_key=3)
_KINDS = {
    "chat_template": bool,
    "data_files": tuple[str, ...],
    "max_size": str,
    "temperature": float,
}


class _Given:
    def given(self) -> dict[str, Any]:
        """The keys that were set, as a recipe has them."""
        held = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in held.items()}


def _options() -> list[tuple[str, Any, Any]]:
    """An option for each key, given item by item if it is a list.

    None leaves a key to the recipe or its default.
    """
    return [
        (
            name,
            Annotated[
                _kind(name) | None,
                Parameter(
                    help=_help(name),
                    group=_PANEL,
                    negative=None if _kind(name) is bool else (),
                ),
            ],
            None,
        )
        for name in Recipe.model_fields
    ]


def _kind(name: str) -> Any:
    default = Recipe.model_fields[name].default
    number = type(default) is int or name == "max_documents"
    return _KINDS.get(name, int if number else str)


def _help(name: str) -> str:
    field = Recipe.model_fields[name]
    told = field.is_required() or field.default in (None, [])
    return f"{field.description}{'' if told else f' Default: {field.default}.'}"


if TYPE_CHECKING:
    RecipeOptions = _Given
else:
    RecipeOptions = record("RecipeOptions", _options(), _Given)


def recipe_of(name_or_path: str | None, options: RecipeOptions) -> Recipe:
    """The recipe of this name or in this file; options replace its keys."""
    keys = read_recipe(name_or_path) if name_or_path else {}
    return Recipe.of(**{**keys, **options.given()})

"""The common keys of a recipe as options of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from selfspec.building.recipe import OPTIONS, Recipe, read_recipe
from selfspec.cli.options import record

_KINDS = {
    "chat_template": bool,
    "data_files": tuple[str, ...],
    "max_documents": int,
    "max_new_tokens": int,
    "temperature": float,
    "warmup_tokens": int,
}


class _Given:
    def given(self) -> dict[str, Any]:
        """The keys that were set, as a recipe has them."""
        held = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in held.items()}


def _option(name: str) -> tuple[str, Any, Any]:
    """An option that leaves a key to the recipe or its default where it is not given."""
    field, kind = Recipe.model_fields[name], _KINDS.get(name, str)
    parameter = Parameter(help=field.description, negative=None if kind is bool else ())
    return name, Annotated[kind | None, parameter], None


if TYPE_CHECKING:
    RecipeOptions = _Given
else:
    RecipeOptions = record("RecipeOptions", map(_option, OPTIONS), _Given)


def recipe_of(name_or_path: str | None, options: RecipeOptions) -> Recipe:
    """The recipe of this name or in this file; options replace its keys."""
    keys = read_recipe(name_or_path) if name_or_path else {}
    return Recipe.of(**{**keys, **options.given()})

"""The keys of a recipe as options of a command."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from selfspec.building.recipe import BUILDS, FORMS, LEARN_FROM, Recipe, read_recipe
from selfspec.cli.shared.errors import CliError

_DATA = "Data (what is read)"
_TABLES = "Tables (what is kept of it)"
_MODEL = "The model's reading and writing"


def _key(panel: str, text: str, **more: Any) -> Any:
    return Option(help=text, rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Every key of a `Recipe`, under its own name; None leaves it to the recipe or its default."""

    name: Annotated[str | None, _key(_DATA, "Name on the cache's card. Default: the data's.")] = (
        None
    )
    data: Annotated[
        str | None,
        _key(
            _DATA,
            "A Hub id, a file, a folder, or json, csv, parquet, arrow or text with --data-files; "
            "vocabulary: no data.",
        ),
    ] = None
    data_files: Annotated[
        list[str] | None,
        _key(_DATA, "Glob of the files to read; can be given again. Default: all of them."),
    ] = None
    config_name: Annotated[
        str | None, _key(_DATA, "Configuration of a Hub data set that has several.")
    ] = None
    revision: Annotated[
        str | None, _key(_DATA, "Branch, tag or commit of a Hub data set. A commit never changes.")
    ] = None
    split: Annotated[str | None, _key(_DATA, "Split of a Hub data set. Default: train.")] = None
    column: Annotated[str | None, _key(_DATA, "Column that holds the text. Default: text.")] = None
    messages: Annotated[
        str | None,
        _key(_DATA, "Column that holds conversations, which is read instead of a text column."),
    ] = None
    roles: Annotated[
        list[str] | None,
        _key(_DATA, "Who speaks, as data=template, such as human=user; can be given again."),
    ] = None
    form: Annotated[
        str | None,
        _key(_DATA, f"A document in a plain text file: {', '.join(FORMS)}. Default: all of it."),
    ] = None
    chat_template: Annotated[
        bool | None,
        Option(
            "--chat-template/--no-chat-template",
            help="Put conversations and prompts through the tokenizer's template. Default: yes.",
            rich_help_panel=_DATA,
            show_default=False,
        ),
    ] = None
    licence: Annotated[str | None, _key(_DATA, "Licence of the data, for the card.")] = None
    max_documents: Annotated[
        int | None, _key(_DATA, "Read no more documents. More: rarer n-grams, more time.")
    ] = None
    build: Annotated[
        str | None,
        _key(_TABLES, f"{', '.join(BUILDS)}. ngrams from text needs no model. Default: both."),
    ] = None
    learn_from: Annotated[
        str | None,
        _key(_TABLES, f"{', '.join(LEARN_FROM)}: the model's answers, or the data. Default: text."),
    ] = None
    max_prefix: Annotated[
        int | None,
        _key(_TABLES, "Longest prefix of an n-gram, 1 to 8. More: surer drafts. Default: 4."),
    ] = None
    min_count: Annotated[
        int | None, _key(_TABLES, "Drop what came less often. More: a smaller file. Default: 2.")
    ] = None
    max_continuations: Annotated[
        int | None, _key(_TABLES, "Kept for a prefix. More: a larger file. Default: 8.")
    ] = None
    max_size: Annotated[
        str | None,
        _key(_TABLES, "Of the n-gram file; min_count is raised until it fits. Default: 64MB."),
    ] = None
    warmup_tokens: Annotated[
        int | None,
        _key(_MODEL, "Tokens that the model reads for the LUTs; 0: all. Default: 1000000."),
    ] = None
    window: Annotated[
        int | None, _key(_MODEL, "Tokens read at once. More: more context. Default: 256.")
    ] = None
    batch: Annotated[
        int | None,
        _key(_MODEL, "Windows or prompts at once. More: faster, more memory. Default: 8."),
    ] = None
    max_prompt_tokens: Annotated[
        int | None, _key(_MODEL, "Leave out longer prompts. Default: 1024.")
    ] = None
    max_new_tokens: Annotated[
        int | None,
        _key(_MODEL, "Where an answer is cut. More: more text. Default: 256."),
    ] = None
    temperature: Annotated[
        float | None, _key(_MODEL, "0: likeliest answers. Higher: more varied ones. Default: 0.")
    ] = None
    seed: Annotated[
        int | None, _key(_MODEL, "For sampling: same seed, same answers. Default: 0.")
    ] = None

    def given(self) -> dict[str, Any]:
        """The keys that were set, as a recipe has them."""
        values = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if getattr(self, each.name) not in (None, [])
        }
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

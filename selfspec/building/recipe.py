"""`Recipe`: what a cache is built from and how, named, typed, defaulted and validated.

Knows nothing of data sets, tokenizers or models: only names and numbers.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from selfspec.errors import BuildError, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VOCABULARY = "vocabulary"
_RECIPES = resources.files("selfspec") / "building" / "recipes"


Text = Annotated[str, Field(min_length=1)]
TextOrNone = Annotated[str | None, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class Recipe(BaseModel):
    """What to read, what to build from it, and how much of it to keep.

    Each key is an option of the command too, and the text below it is the option's.
    """

    model_config = ConfigDict(
        allow_inf_nan=False, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    data: Text
    """A Hub id, a file or a folder. vocabulary: no data, but each token of the model."""
    name: Text
    """Name on the cache's card; if none is given, that of the data."""
    data_files: list[str] = []
    """Glob of the files to read, such as '**/*.md'."""
    config_name: TextOrNone = None
    """Configuration of a Hub data set that has several."""
    revision: TextOrNone = None
    """Branch, tag or commit of a Hub data set. A commit never changes."""
    split: Text = "train"
    """Split of a Hub data set."""
    column: Text = "text"
    """Column that holds texts, or lists of token ids."""
    messages: TextOrNone = None
    """Column that holds conversations, read instead."""
    form: Literal["document", "line", "paragraph"] = "document"
    """What a document is in plain text files: document, line or paragraph."""
    chat_template: bool = True
    """Put conversations into the chat template."""
    licence: Text = "unknown"
    """Licence of the data, for the card."""
    max_documents: Annotated[int | None, Field(ge=1)] = None
    """Read at most this number of documents."""

    build: Literal["both", "lut", "texts"] = "both"
    """lut, texts (the first 262,144 tokens, which need no model) or both."""
    warmup_tokens: Annotated[int, Field(ge=0)] = 1_000_000
    """Tokens that the model reads for the LUTs; 0: all."""
    window: Count = 256
    """Tokens read at once. More: more context."""
    batch: Count = 8
    """Windows read at once. More: faster, more memory."""

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Recipe:
        if self.reads_vocabulary and self.build != "lut":
            raise ValueError(f"--data vocabulary must come with --build lut (got {self.build!r})")
        return self

    @classmethod
    def of(cls, **keys: Any) -> Recipe:
        """A recipe from keywords; without a name, it gets that of the data."""
        data = keys.get("data")
        if data is None:
            raise BuildError("--data must name what to read: a file, a folder or a Hub id")
        name = Path(data).resolve().name if isinstance(data, str) else None
        try:
            return cls(**{"name": name, **keys})
        except ValidationError as error:
            raise BuildError(_message(error)) from error

    @property
    def wants_texts(self) -> bool:
        return self.build != "lut"

    @property
    def wants_lut(self) -> bool:
        return self.build != "texts"

    @property
    def reads_vocabulary(self) -> bool:
        return self.data == _VOCABULARY

    @property
    def uses_template(self) -> bool:
        """Conversations and tokens go through the template; texts do not."""
        return self.chat_template and (self.messages is not None or self.reads_vocabulary)


def _message(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return unknown_name("recipe key", name, Recipe.model_fields)
    rule = first["msg"].replace("Input should", "must").replace("String should", "must")
    return f"{name} {rule} (got {first['input']!r:.80})"


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """The keys of a recipe that comes with selfspec, or of a TOML file.

    They are not checked yet, since options may replace them.
    """
    path: Any = _RECIPES / f"{name_or_path}.toml"
    if name_or_path not in recipe_names():
        path = Path(name_or_path)
        if path.suffix != ".toml" and not path.exists():
            known = unknown_name("recipe", name_or_path, recipe_names())
            raise BuildError(f"{known}, or name a file")
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise BuildError(
            f"--recipe must be a readable TOML file (got {name_or_path!r}: {error})"
        ) from error


def recipe_names() -> list[str]:
    return sorted(path.name.removesuffix(".toml") for path in _RECIPES.iterdir())

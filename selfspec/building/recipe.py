"""`Recipe`: what a cache is built from and how, named, typed, defaulted and validated.

Knows nothing of data sets, tokenizers or models: only names and numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from selfspec.errors import BuildError, ConfigError, unknown_name
from selfspec.machine.memory import amount_in_bytes

BUILDS = ("both", "lut", "ngrams")
LEARN_FROM = ("generations", "text")
FORMS = ("document", "line", "paragraph")
_PLACEHOLDER = "FILL-IN"
_VOCABULARY = "vocabulary"
_MAX_PREFIX = 8
_LEAST_SIZE = 10_000
# What each key of a recipe means, in parts. The command's help says the same.
KEYS = {
    "Data (what is read)": {
        "name": "Name on the cache's card. Default: that of the data.",
        "data": "A Hub id, a file, a folder, or json, csv, parquet, arrow or text with "
        "--data-files; vocabulary: no data, the model reads each of its tokens.",
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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to read, what to build from it, and how much of it to keep; `KEYS` explains each."""

    name: str
    data: str
    data_files: tuple[str, ...] = ()
    config_name: str | None = None
    revision: str | None = None
    split: str = "train"
    column: str = "text"
    messages: str | None = None
    roles: dict[str, str] = field(default_factory=dict)
    form: str = "document"
    chat_template: bool = True
    licence: str = "unknown"
    max_documents: int | None = None
    build: str = "both"
    learn_from: str = "text"
    max_prefix: int = 4
    min_count: int = 2
    max_continuations: int = 8
    max_size: int | str = "64MB"
    warmup_tokens: int = 1_000_000
    window: int = 256
    batch: int = 8
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_numbers()
        self._check_choice("build", "what to build", BUILDS)
        self._check_choice("learn_from", "text to learn from", LEARN_FROM)
        self._check_choice("form", "form of a document", FORMS)
        if self.reads_vocabulary and (self.build, self.learn_from) != ("lut", "text"):
            raise BuildError(
                "build must be 'lut' and learn_from 'text' with data = 'vocabulary', whose tokens "
                f"are no texts (got {self.build!r} and {self.learn_from!r})"
            )
        if not isinstance(self.chat_template, bool):
            raise BuildError(f"chat_template must be true or false (got {self.chat_template!r})")
        try:
            size = amount_in_bytes(self.max_size, name="max_size")
        except ConfigError as error:
            raise BuildError(str(error)) from error
        object.__setattr__(self, "max_size", size)
        if self.max_bytes < _LEAST_SIZE:
            raise BuildError(f"max_size must be >= {_LEAST_SIZE // 1000}KB (got {self.max_size})")

    @classmethod
    def of(cls, **values: Any) -> Recipe:
        """Builds a recipe from keywords; an unknown one is answered with the nearest name."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise BuildError(unknown_name("recipe key", name, known))
        for name in ("name", "data"):
            if values.get(name) is None:
                raise BuildError(f"a recipe must have a {name}; write it in, or pass --{name}")
        return cls(**values)

    @property
    def max_bytes(self) -> int:
        """The size that the n-gram file may have."""
        return int(self.max_size)

    @property
    def wants_ngrams(self) -> bool:
        """Are n-grams counted?"""
        return self.build != "lut"

    @property
    def wants_lut(self) -> bool:
        """Are LUTs filled, for which the model must run?"""
        return self.build != "ngrams"

    @property
    def generates(self) -> bool:
        """Does the model write answers, and not only read?"""
        return self.learn_from == "generations"

    @property
    def reads_vocabulary(self) -> bool:
        """Are the model's own tokens read, and no data?"""
        return self.data == _VOCABULARY

    @property
    def uses_template(self) -> bool:
        """Prompts, conversations and tokens go through the template; texts to read do not."""
        has_turns = self.messages is not None or self.generates or self.reads_vocabulary
        return self.chat_template and has_turns

    def as_dict(self) -> dict[str, Any]:
        """All keys with their values, in types that JSON has."""
        return {**asdict(self), "data_files": list(self.data_files)}

    def changed_keys(self) -> dict[str, Any]:
        """The keys that differ from the defaults."""
        defaults = Recipe(name="-", data="-").as_dict()
        return {key: value for key, value in self.as_dict().items() if value != defaults[key]}

    def _check_texts(self) -> None:
        for name in ("name", "data", "split", "column", "licence"):
            self._check_text(name, getattr(self, name))
        for name in ("config_name", "revision", "messages"):
            if getattr(self, name) is not None:
                self._check_text(name, getattr(self, name))
        if not isinstance(self.data_files, (str, list, tuple)):
            raise BuildError(f"data_files must be a list of globs (got {self.data_files!r})")
        globs = [self.data_files] if isinstance(self.data_files, str) else self.data_files
        object.__setattr__(self, "data_files", tuple(globs))
        for glob in self.data_files:
            self._check_text("data_files", glob)
        if not isinstance(self.roles, Mapping):
            raise BuildError(f"roles must be a table of names (got {self.roles!r})")
        for name, role in self.roles.items():
            self._check_text("roles", name)
            self._check_text(f"roles.{name}", role)

    def _check_text(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or not value.strip():
            raise BuildError(f"{name} must be a text that is not empty (got {value!r})")
        if _PLACEHOLDER in value:
            option = f"--{name.replace('_', '-')}"
            raise BuildError(
                f"{name} must be filled in (got {value!r}): write it into the recipe, "
                f"or pass {option}"
            )

    def _check_numbers(self) -> None:
        counts = ("max_prefix", "min_count", "max_continuations", "window", "batch")
        for name in (*counts, "max_prompt_tokens", "max_new_tokens"):
            self._check_count(name, 1)
        for name in ("seed", "warmup_tokens"):
            self._check_count(name, 0)
        if self.max_documents is not None:
            self._check_count("max_documents", 1)
        if self.max_prefix > _MAX_PREFIX:
            raise BuildError(f"max_prefix must be <= {_MAX_PREFIX} (got {self.max_prefix})")
        value = self.temperature
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 100:
            raise BuildError(f"temperature must be a number in [0, 100) (got {value!r})")
        object.__setattr__(self, "temperature", float(value))

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BuildError(f"{name} must be a whole number (got {value!r})")
        if value < least:
            raise BuildError(f"{name} must be >= {least} (got {value})")

    def _check_choice(self, name: str, kind: str, known: Iterable[str]) -> None:
        if getattr(self, name) not in known:
            raise BuildError(unknown_name(kind, str(getattr(self, name)), known))


def read_recipe(path: Path) -> dict[str, Any]:
    """The keys of a TOML file. They are not checked yet, since options may replace them."""
    tomllib = _tomllib()
    try:
        text = path.read_text(encoding="utf-8")
        return dict(tomllib.loads(text))
    except UnicodeDecodeError as error:
        raise BuildError(f"recipe {str(path)!r} must be UTF-8 text") from error
    except OSError as error:
        raise BuildError(f"recipe must be a readable file (got {str(path)!r})") from error
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"recipe {str(path)!r} must be TOML: {error}") from error


def _tomllib() -> Any:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib
    try:
        import tomli
    except ImportError as error:
        raise BuildError("a recipe needs tomli on Python 3.10: pip install tomli") from error
    return tomli

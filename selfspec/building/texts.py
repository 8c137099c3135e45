"""Texts to learn from as token ids, in the same order every time: plain text files, or rows that
`datasets` loads from files, folders and the Hub.

A document is a text, a conversation, token ids, or None for a row with nothing in it. `datasets` is
imported when rows are read, since it comes with the `cache` extra only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import fsspec
import numpy as np
from numpy.typing import NDArray

from selfspec.building.recipe import Recipe
from selfspec.cache import tokenizer_info
from selfspec.errors import BuildError, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = NDArray[np.int64]
Messages = list[dict[str, str]]
Document = str | Messages | TokenIds | None

_BUILDERS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_PACKED = (".bz2", ".gz", ".xz", ".zst")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)
_PIECE = 1 << 20  # Characters. Longer text is cut into several documents at ends of lines.
_AT_ONCE = 16  # Documents that are tokenized together. The tokenizer uses all cores for that.


def read_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[TokenIds | None]:
    """The token ids of each document; None if it is empty or if the template refuses it.

    A model's own vocabulary is read as documents of one token each, mostly the frequent ones first.
    """
    if recipe.reads_vocabulary:
        size = tokenizer_info(tokenizer).vocab_size
        return (np.array([token]) for token in range(size))
    documents = read_documents(recipe)
    parts = iter(lambda: list(islice(documents, _AT_ONCE)), [])
    return (ids for part in parts for ids in encode(part, recipe, tokenizer))


# -- files and rows ----------------------------------------------------------------------------


def read_documents(recipe: Recipe) -> Iterator[Document]:
    """The documents, up to the recipe's `max_documents`. A wrong path is refused at once."""
    builder, files = find_files(recipe)
    rows = islice(_rows(recipe, builder, files), recipe.max_documents)
    return (_document(recipe, row, number) for number, row in enumerate(rows))


def find_files(recipe: Recipe) -> tuple[str | None, list[str]]:
    """What reads a recipe's `data`, and the paths to read; None and globs for the Hub."""
    path = Path(recipe.data).expanduser()
    if not path.exists():
        if path.suffix.lower() in {*_BUILDERS, *_PACKED, ".txt"}:
            raise BuildError(f"--data: no such file (got {recipe.data!r})")
        if not _HUB_ID.fullmatch(recipe.data):
            raise BuildError(
                "--data must be a file or folder that exists, or a Hub id such as owner/name "
                f"(got {recipe.data!r})"
            )
        return None, recipe.data_files
    files = [path] if path.is_file() else _files_in(path, recipe.data_files)
    builders = sorted({_builder_of(file) for file in files})
    if len(builders) > 1:
        raise BuildError(
            f"--data must hold files of one kind (got {', '.join(builders)}); choose some with "
            "--data-files, such as '**/*.jsonl'"
        )
    return builders[0], [str(file) for file in files]


def _files_in(folder: Path, globs: list[str]) -> list[Path]:
    try:
        paths = {path for pattern in globs or ["**/*"] for path in folder.glob(pattern)}
    except (NotImplementedError, ValueError) as error:
        raise BuildError(f"--data-files must be globs inside --data (got {globs})") from error
    files = sorted(path for path in paths if path.is_file())
    shown = [path for path in files if "/." not in f"/{path.relative_to(folder).as_posix()}"]
    if not shown:
        wanted = f" that match {globs}" if globs else ""
        raise BuildError(f"--data must be a folder with files{wanted} (got {str(folder)!r})")
    return shown


def _builder_of(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    return _BUILDERS.get(suffixes[-1], "text") if suffixes else "text"


def _rows(recipe: Recipe, builder: str | None, files: list[str]) -> Iterator[Mapping[str, Any]]:
    """The rows. Whatever their reader raises is reported as bad data."""
    number = 0
    try:
        rows = _plain(recipe, files) if builder == "text" else _loaded(recipe, builder, files)
        for row in rows:
            number += 1
            yield row
    except BuildError:
        raise
    except Exception as error:  # Its readers raise anything, and StopIteration for an empty file.
        cause = error.__cause__ or error
        after = f" after {number} documents" if number else ""
        raise BuildError(
            f"--data {recipe.data!r} can't be read{after}: {str(cause) or type(cause).__name__}"
        ) from error


def _plain(recipe: Recipe, files: list[str]) -> Iterator[Mapping[str, str]]:
    """The documents of text files, packed or not: all of each, its lines, or its paragraphs.

    Bytes that are not UTF-8 become replacement characters. A file that is not text gives nothing,
    since a folder of sources may hold pictures too.
    """
    how: dict[str, Any] = {"compression": "infer", "encoding": "utf-8", "errors": "replace"}
    for path in files:
        with fsspec.open(path, "rt", **how) as stream:
            if "\0" not in stream.read(4096):
                stream.seek(0)
                for text in _split(stream, recipe.form):
                    yield {recipe.column: text}


def _split(stream: TextIO, form: str) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    while line := stream.readline(_PIECE):
        if form == "line":
            yield line.rstrip("\n")
            continue
        is_between = form == "paragraph" and not line.strip()
        if lines and (is_between or size > _PIECE):
            yield "".join(lines)
            lines, size = [], 0
        if not is_between:
            lines.append(line)
            size += len(line)
    if lines:
        yield "".join(lines)


def _loaded(recipe: Recipe, builder: str | None, files: list[str]) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise BuildError(
            "reading data sets needs the datasets package: pip install datasets"
        ) from error
    datasets.disable_progress_bars()
    rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
        recipe.data if builder is None else builder,
        name=recipe.config_name if builder is None else None,
        revision=recipe.revision if builder is None else None,
        split=recipe.split,
        streaming=True,
        data_files=files or None,
    )
    return rows


def _document(recipe: Recipe, row: Mapping[str, Any], number: int) -> Document:
    name = recipe.messages or recipe.column
    if name not in row:
        raise BuildError(f"document {number}: {unknown_name('column', name, row)}")
    value = row[name]
    if not value:
        return None
    if recipe.messages is not None:
        if isinstance(value, list) and all(map(_is_message, value)):
            return value
        rule = "lists of messages, each with role and content as texts"
    else:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(type(item) is int for item in value):
            return np.array(value, np.int64)
        rule = "texts or lists of token ids"
    raise BuildError(f"document {number}: column {name!r} must hold {rule} (got {value!r:.80})")


def _is_message(value: object) -> bool:
    keys = ("role", "content")
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in keys)


# -- tokens ------------------------------------------------------------------------------------


def encode(
    documents: Sequence[Document], recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> list[TokenIds | None]:
    texts = [_text_of(document, recipe, tokenizer) or "" for document in documents]
    # A template writes the special tokens itself.
    adds_special = not recipe.uses_template
    encoded = tokenizer(texts, add_special_tokens=adds_special, verbose=False)["input_ids"]
    ids_of = []
    for document, text, ids in zip(documents, texts, encoded, strict=True):
        if isinstance(document, np.ndarray):
            ids_of.append(document if len(document) else None)
        else:
            ids_of.append(np.array(ids, np.int64) if text and ids else None)
    return ids_of


def _text_of(document: Document, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str | None:
    from jinja2.exceptions import TemplateError

    if not isinstance(document, list):
        return document if isinstance(document, str) else None
    if not document:
        return None
    if not recipe.uses_template:
        return "\n\n".join(message["content"] for message in document)
    try:
        text = str(tokenizer.apply_chat_template(document, tokenize=False))
    except TemplateError:  # For example two turns of one speaker in a row.
        return None
    return text

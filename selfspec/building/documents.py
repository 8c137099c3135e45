"""Reads documents one by one, in the same order every time: plain text files, or what `datasets`
loads from files, folders and the Hub.

A document is a text, a conversation, token ids, or None for a row with nothing in it.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError, unknown_name

Message = dict[str, str]
TokenIds = NDArray[np.int64]
Document = str | list[Message] | TokenIds | None

_KINDS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".tsv": "tsv",
}
_PACKED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)
_BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error)
_PIECE = 1 << 20  # Characters. Longer text is cut into several documents at ends of lines.
# The names that data sets give to speakers, with those that chat templates use.
_ROLES = {
    "assistant": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "chatgpt": "assistant",
    "gpt": "assistant",
    "human": "user",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")


class Inputs(NamedTuple):
    """What is read."""

    source: str  # "text", another builder of `datasets`, "tsv", or a Hub id.
    files: list[str]  # Paths, or globs within a data set of the Hub.
    is_local: bool


def read_documents(recipe: Recipe) -> Iterator[Document]:
    """The documents, up to the recipe's `max_documents`. A wrong path is refused at once."""
    inputs = find_inputs(recipe)
    if inputs.is_local and inputs.source == "text":
        texts = (text or None for path in inputs.files for text in read_plain(path, recipe.form))
        return islice(texts, recipe.max_documents)
    rows = islice(_rows(recipe, inputs), recipe.max_documents)
    return (_document(recipe, row, number) for number, row in enumerate(rows))


def find_inputs(recipe: Recipe) -> Inputs:
    """The files or the name that a recipe's `data` and `data_files` mean."""
    path = Path(recipe.data).expanduser()
    if not path.exists():
        if not _HUB_ID.fullmatch(recipe.data):
            raise BuildError(
                "--data must be a file or folder that exists, or a Hub id such as owner/name "
                f"(got {recipe.data!r})"
            )
        return Inputs(recipe.data, recipe.data_files, is_local=False)
    files = [path] if path.is_file() else _files_in(path, recipe.data_files)
    kinds = sorted({_kind(file) for file in files})
    if len(kinds) > 1:
        raise BuildError(
            f"--data must hold files of one kind (got {', '.join(kinds)}); choose some with "
            "--data-files, such as '**/*.jsonl'"
        )
    if recipe.split != "train":
        raise BuildError(
            f"--split must be train where files are read (got {recipe.split!r}); choose among "
            "them with --data-files"
        )
    if kinds == ["text"] and recipe.messages is not None:
        raise BuildError(
            f"--messages must be read from rows, as JSON or Parquet has them (got {recipe.data!r}, "
            "which is plain text)"
        )
    return Inputs(kinds[0], [str(file) for file in files], is_local=True)


def _files_in(folder: Path, globs: list[str]) -> list[Path]:
    """The files of a folder in the order of their names, hidden ones left out."""
    try:
        found = {path for pattern in globs or ["**/*"] for path in folder.glob(pattern)}
    except (NotImplementedError, ValueError) as error:
        raise BuildError(f"--data-files must be globs inside --data (got {globs})") from error
    hidden = [any(part.startswith(".") for part in p.relative_to(folder).parts) for p in found]
    files = [path for path, is_hidden in zip(found, hidden, strict=True) if not is_hidden]
    if not (files := sorted(path for path in files if path.is_file())):
        wanted = f" that match {globs}" if globs else ""
        raise BuildError(f"--data must be a folder with files{wanted} (got {str(folder)!r})")
    return files


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (*_PACKED, ".zst"):
        suffixes.pop()
    return _KINDS.get(suffixes[-1], "text") if suffixes else "text"


def read_plain(path: str, form: str) -> Iterator[str]:
    """The documents of one text file, packed or not: all of it, its lines, or its paragraphs.

    Bytes that are not UTF-8 become replacement characters. A file that is not text gives nothing,
    since a folder of sources may hold pictures too.
    """
    opened = _PACKED.get(Path(path).suffix.lower(), open)
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as stream:
            if "\0" not in stream.read(4096):
                stream.seek(0)
                yield from _texts(stream, form)
    except _BROKEN as error:
        raise BuildError(f"--data can't be read (got {path!r}: {error})") from error


def _texts(stream: TextIO, form: str) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    while line := stream.readline(_PIECE):
        if form == "line":
            yield line.rstrip("\n")
            continue
        between = form == "paragraph" and not line.strip()
        if lines and (between or size > _PIECE):
            yield "".join(lines)
            lines, size = [], 0
        if not between:
            lines.append(line)
            size += len(line)
    if lines:
        yield "".join(lines)


def _rows(recipe: Recipe, inputs: Inputs) -> Iterator[Mapping[str, Any]]:
    """The rows. Whatever their reader raises is reported as bad data."""
    number = 0
    try:
        for row in _load(recipe, inputs):
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


def _load(recipe: Recipe, inputs: Inputs) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise BuildError(
            "reading data sets needs the datasets package: pip install datasets"
        ) from error
    datasets.disable_progress_bars()
    more: dict[str, Any] = {"name": recipe.config_name, "revision": recipe.revision}
    if inputs.is_local:
        more = {"sep": "\t"} if inputs.source == "tsv" else {}
    loaded = datasets.load_dataset(
        "csv" if inputs.source == "tsv" else inputs.source,
        split=recipe.split,
        streaming=True,
        data_files=inputs.files or None,
        **more,
    )
    wanted = _columns(recipe)
    if loaded.column_names is not None and not set(wanted) & set(loaded.column_names):
        raise BuildError(unknown_name("column", wanted[0], loaded.column_names))
    return loaded


def _columns(recipe: Recipe) -> tuple[str, ...]:
    """Where documents are looked for. A file of prompts may hold texts and conversations."""
    if recipe.generates:
        return (recipe.column, recipe.messages or "messages")
    return (recipe.messages or recipe.column,)


def _document(recipe: Recipe, row: Mapping[str, Any], number: int) -> Document:
    columns = [name for name in _columns(recipe) if name in row]
    if not columns:
        raise BuildError(f"document {number}: {unknown_name('column', _columns(recipe)[0], row)}")
    name = next((name for name in columns if row[name]), None)
    if name is None:
        return None
    value = row[name]
    if name == recipe.messages or name != recipe.column:
        return _messages(value, name, number)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(each) is int for each in value):
        return np.array(value, np.int64)
    raise _wrong(number, f"column {name!r} must hold texts or lists of token ids", value)


def _messages(value: Any, name: str, number: int) -> list[Message]:
    if isinstance(value, Mapping):  # This is a table given by columns, not by rows.
        value = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise _wrong(number, f"column {name!r} must hold lists of messages", value)
    return [_message(each, number) for each in value]


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(number, "a message must be a table with role and content", message)
    role = str(next((message[key] for key in _ROLE_KEYS if message.get(key)), None))
    content = next((message[key] for key in _CONTENT_KEYS if message.get(key) is not None), "")
    if role not in _ROLES:
        raise BuildError(f"document {number}: {unknown_name('role', role, _ROLES)}")
    if not isinstance(content, str):
        raise _wrong(number, "a message's content must be text", content)
    return {"role": _ROLES[role], "content": content}


def _wrong(number: int, rule: str, got: Any) -> BuildError:
    shown = repr(got)
    return BuildError(f"document {number}: {rule} (got {shown[:80]}{'…' * (len(shown) > 80)})")

"""Reads documents one by one, in the same order every time, from anything `datasets` loads.

A document is a text, a conversation, or None for an empty row. Empty rows count too, so that a
build that goes on knows how many to skip.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from selfspec.building.inputs import Inputs
from selfspec.building.plain import read_plain
from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError, unknown_name

Message = dict[str, str]
Document = str | list[Message] | None

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


def read_documents(
    recipe: Recipe, inputs: Inputs, skip: int = 0
) -> Generator[Document, None, None]:
    """The documents behind the first `skip`, up to the recipe's `max_documents`."""
    if inputs.kind == "text" and inputs.files:
        texts = (text for path in inputs.files for text in read_plain(path, recipe.form))
        yield from islice((text or None for text in texts), skip, recipe.max_documents)
        return
    left = None if recipe.max_documents is None else max(recipe.max_documents - skip, 0)
    rows = islice(_rows(recipe, inputs, skip), left)
    for number, row in enumerate(rows, start=skip):
        yield _document(recipe, row, number)


def in_parts(
    documents: Iterable[Document], most_documents: int, most_characters: int
) -> Iterator[list[Document]]:
    """Documents in order, several together; a part ends behind the one that makes it too large."""
    part: list[Document] = []
    size = 0
    for document in documents:
        part.append(document)
        texts = [each["content"] for each in document] if isinstance(document, list) else [document]
        size += sum(len(text or "") for text in texts)
        if size > most_characters or len(part) == most_documents:
            yield part
            part, size = [], 0
    if part:
        yield part


def _rows(recipe: Recipe, inputs: Inputs, skip: int) -> Iterator[Mapping[str, Any]]:
    """The rows behind the first `skip`. Whatever their reader raises is reported as bad data."""
    number = skip
    try:
        for row in _load(recipe, inputs).skip(skip):
            number += 1
            yield row
    except BuildError:
        raise
    except Exception as error:  # Its readers raise anything, and StopIteration for an empty file.
        raise _unreadable(recipe, number, error.__cause__ or error) from error


def _unreadable(recipe: Recipe, number: int, cause: BaseException) -> BuildError:
    why = str(cause) or type(cause).__name__
    if number:
        return BuildError(f"data {recipe.data!r} can't be read after {number} documents: {why}")
    fix = "name a file or a folder that exists, or a Hub id"
    return BuildError(f"data {recipe.data!r} can't be read: {why}; {fix}")


def _datasets() -> Any:
    """The package, which comes with the `cache` extra only."""
    try:
        import datasets
    except ImportError as error:
        raise BuildError(
            "reading data sets needs the datasets package: pip install datasets"
        ) from error
    return datasets


def _load(recipe: Recipe, inputs: Inputs) -> Any:
    datasets = _datasets()
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(split=recipe.split, streaming=True, **_arguments(recipe, inputs))
    wanted, columns = recipe.messages or recipe.column, loaded.column_names
    if columns is not None and wanted not in columns:
        raise BuildError(unknown_name("column", wanted, columns))
    return loaded


def _arguments(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    files = [str(path) for path in inputs.files] or list(inputs.addresses) or None
    if inputs.kind == "hub":
        return {
            "path": recipe.data,
            "name": recipe.config_name,
            "revision": recipe.revision,
            "data_files": files,
        }
    more = {"tsv": {"sep": "\t"}, "text": {"sample_by": recipe.form}}.get(inputs.kind, {})
    return {"path": {"tsv": "csv"}.get(inputs.kind, inputs.kind), "data_files": files, **more}


def _document(recipe: Recipe, row: Mapping[str, Any], number: int) -> Document:
    name = recipe.messages or recipe.column
    if name not in row:
        raise BuildError(f"document {number}: {unknown_name('column', name, row)}")
    value = row[name]
    if not value:
        return None
    if recipe.messages is not None:
        return _messages(value, recipe, number)
    if not isinstance(value, str):
        raise _wrong(number, f"column {name!r} must hold texts", value)
    return value


def _messages(value: Any, recipe: Recipe, number: int) -> list[Message]:
    if isinstance(value, Mapping):  # This is a table given by columns, not by rows.
        value = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise _wrong(number, f"column {recipe.messages!r} must hold lists of messages", value)
    known = {**_ROLES, **recipe.roles}
    return [_message(each, known, number) for each in value]


def _message(message: Any, known: Mapping[str, str], number: int) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(number, "a message must be a table with role and content", message)
    role = str(next((message[key] for key in _ROLE_KEYS if message.get(key)), None))
    content = next((message[key] for key in _CONTENT_KEYS if message.get(key) is not None), "")
    if role not in known:
        hint = "add it to roles, such as --roles human=user"
        raise BuildError(f"document {number}: {unknown_name('role', role, known)}; {hint}")
    if not isinstance(content, str):
        raise _wrong(number, "a message's content must be text", content)
    return {"role": known[role], "content": content}


def _wrong(number: int, rule: str, got: Any) -> BuildError:
    shown = repr(got)
    return BuildError(f"document {number}: {rule} (got {shown[:80]}{'…' * (len(shown) > 80)})")

"""One cache in one safetensors file: a card in JSON as its metadata, tables as its tensors.

It is a file here, or the one file of a repository of the Hub.

A file may come from anywhere. It is refused unless it is a plain file that holds a card and tables
of the right shapes; what the tables say is never trusted, since the model checks every draft.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from selfspec.cache.contents import (
    Arrays,
    CacheContents,
    Tokenizer,
    TokenizerInfo,
    check_table,
    tokenizer_info,
)
from selfspec.config import OLD_SOURCE_NAMES
from selfspec.errors import CacheError, first_mistake, one_line
from selfspec.machine.hub import ask_once
from selfspec.machine.memory import free_memory
from selfspec.machine.user_files import replace_bytes

SUFFIX = ".safetensors"
FILE_NAME = "selfspec-cache.safetensors"  # A cache has this name in every repository.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FORMAT = 3
_DTYPES = {"F16", "I32", "U16", "U32"}
_KEY = "selfspec"  # The one entry of the metadata. Several would be written in any order.


# Evidence, hits and trials.
_Rate = tuple[list[tuple[str, int, int, int, int]], float, float]


class _Card(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    format_version: Literal[3]
    tokenizer: TokenizerInfo
    about: dict[str, Any]
    calibration: list[_Rate] | None


def file_of(name: str | os.PathLike[str]) -> Path:
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise CacheError(f"a cache must be named by its file or its Hub id (got {name!r})")
    path = Path(os.path.expanduser(name))
    return path if path.name.endswith(SUFFIX) else Path(f"{path}{SUFFIX}")


def load_cache(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    tokenizer: Tokenizer | TokenizerInfo | None = None,
) -> CacheContents:
    """Loads a cache: the file of this name, the one in that folder, or what the Hub has.

    With a `revision`, the Hub is asked at once. Refuses a damaged cache and, with `tokenizer`, one
    of another tokenizer.
    """
    wanted = None if tokenizer is None else tokenizer_info(tokenizer)
    file_of(path_or_hub_id)  # Refuses what is no name.
    name = os.fspath(path_or_hub_id)
    if os.path.isfile(beside_weights := os.path.join(name, FILE_NAME)):
        name = beside_weights
    elif os.path.isfile(os.path.join(name, "config.json")):
        raise CacheError(
            f"{name!r} is the folder of a model, and no cache; to draft for it, load it, and call "
            "selfspec.attach(model) and generate(..., assistant=SelfSpec())"
        )
    path = file_of(name)
    if os.path.isfile(name) and not os.path.exists(path):
        raise CacheError(
            f"a cache must be a file that ends with .safetensors (got {name!r}, which is another "
            "file); name a cache, or make one with 'selfspec cache build'"
        )
    if revision is None and (os.path.exists(path) or not _HUB_ID.fullmatch(name)):
        return read_cache(path, wanted)
    from huggingface_hub import hf_hub_download

    try:
        ask_once(name, FILE_NAME, revision=revision)
        fetched = hf_hub_download(name, FILE_NAME, revision=revision)
    except Exception as error:  # Errors of the client's HTTP library have no common name.
        at = f" at revision {revision!r}" if revision else ""
        raise CacheError(
            f"{name!r} must be a cache or a repository of the Hub{at} with one in it "
            f"(got: {one_line(error)})"
        ) from error
    return read_cache(Path(fetched), wanted)


def read_cache(path: Path, tokenizer: TokenizerInfo | None = None) -> CacheContents:
    """What a file holds; refuses one of another tokenizer, and one that is not a whole cache.

    The tables are read into memory, so the file may be replaced or removed afterwards.
    """
    from safetensors import SafetensorError

    try:
        contents = _contents(*_read(path, with_tables=True))
    except (OSError, ValueError, SafetensorError) as error:
        raise CacheError(
            f"cache {str(path)!r} can't be read ({_reason(error)}); name another, or make one with "
            "'selfspec cache build'"
        ) from error
    if tokenizer is not None and contents.tokenizer.fingerprint != tokenizer.fingerprint:
        raise CacheError(
            f"{str(path)!r} was made for tokenizer {contents.tokenizer}, this model uses "
            f"{tokenizer}; name another file, or build one with 'selfspec cache build'"
        )
    return contents


def save_cache(
    path: str | os.PathLike[str],
    contents: CacheContents,
    *,
    overwrite: bool = False,
    mode: int = 0o666,
) -> None:
    """Writes a whole file, which is the same for the same contents."""
    target = check_target(path, overwrite=overwrite)
    data = _as_bytes(contents)
    try:
        replace_bytes(target, data, mode=mode)
    except OSError as error:
        raise CacheError(f"cache {str(target)!r} can't be written ({_reason(error)})") from error


def check_target(
    path: str | os.PathLike[str], *, overwrite: bool = False, option: str = "overwrite=True"
) -> Path:
    """The file to write to, with links followed; refuses what can't be written, before any work.

    Nothing but a cache is ever overwritten. `option` is how the user allows that.
    """
    from safetensors import SafetensorError

    target = Path(os.path.realpath(file_of(path)))
    above = next((folder for folder in target.parents if os.path.exists(folder)), target)
    try:
        with TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise CacheError(
            f"a cache must be in a folder that can be written (got {str(target)!r}: "
            f"{_reason(error)}); name another"
        ) from error
    if os.path.lexists(target):
        if not overwrite:
            raise CacheError(
                f"the file of a new cache must not be there yet (got {str(target)!r}, which "
                f"exists); name another, or replace it with {option}"
            )
        try:
            _read(target, with_tables=False)
        except (OSError, ValueError, SafetensorError) as error:
            raise CacheError(
                f"what is overwritten must be a cache (got {str(target)!r}: {_reason(error)}); "
                "name another file"
            ) from error
    return target


def _as_bytes(contents: CacheContents) -> bytes:
    """Refuses what could not be read."""
    from safetensors.numpy import save

    arrays = {
        f"{source}.{name}": array
        for source, table in contents.tables.items()
        for name, array in table.items()
    }
    if contents.answers is not None:
        arrays["answers.tokens"] = contents.answers
    card = {
        "format_version": _FORMAT,
        "tokenizer": vars(contents.tokenizer),
        "about": dict(contents.about),
        "calibration": contents.calibration,
    }
    try:
        text = json.dumps(card, allow_nan=False)
        _contents(text, arrays)
    except (TypeError, ValueError, RecursionError) as error:
        raise CacheError(f"this can't be saved as a cache: {error}") from error
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(arrays, metadata={_KEY: text})


def _read(path: Path, *, with_tables: bool) -> tuple[str, dict[str, Any]]:
    """The card and the tables; raises `OSError`, `ValueError` or what safetensors raises."""
    from safetensors import safe_open

    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # Opening a pipe would wait for a writer.
        raise ValueError("it is no plain file")
    if with_tables and status.st_size > free_memory():
        raise ValueError(f"it must fit into the free memory, got {status.st_size:,} bytes")
    with safe_open(path, framework="numpy") as file:
        text = (file.metadata() or {}).get(_KEY)
        if text is None:
            raise ValueError("it is no cache of selfspec")
        names = list(file.keys()) if with_tables else []
        if not {file.get_slice(name).get_dtype() for name in names} <= _DTYPES:
            raise ValueError(f"its tables must be of {', '.join(sorted(_DTYPES))}")
        return text, {name: file.get_tensor(name) for name in names}


def _contents(text: str, arrays: Arrays) -> CacheContents:
    """A card and tables, checked and put together; raises `ValueError` where they can't be."""
    try:
        card = _Card.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"its card, {first_mistake(error)}") from error
    tables: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        source, _, rest = name.partition(".")
        tables.setdefault(source, {})[rest] = array
    # A file of version 0.3 may also hold n-grams of a corpus, and maps of hidden states.
    for name in ("corpus", "map"):
        tables.pop(name, None)
    for source, table in tables.items():
        check_table(source, table)
    answers = tables.pop("answers", {}).get("tokens")
    return CacheContents(
        tokenizer=card.tokenizer,
        tables=tables,
        calibration=_checked_rates(card.calibration),
        answers=answers,
        about=card.about,
    )


def _checked_rates(rates: Sequence[_Rate] | None) -> list[list[Any]] | None:
    """The rows of a calibration, as its `rows` gave them: [[evidence, …], hits, trials]."""
    if rates is None:
        return None
    if not all(0 <= hits <= trials and trials > 0 for _, hits, trials in rates):
        raise ValueError("its calibration must have 0 <= hits <= trials and trials > 0")
    return [
        [[[OLD_SOURCE_NAMES.get(name, name), *bins] for name, *bins in evidence], hits, trials]
        for evidence, hits, trials in rates
    ]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(error)

"""The card of a cache folder: what is in it, for which tokenizer, and every file's checksum.

This module knows JSON and names, and opens no file but the card.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import (
    CacheCardError,
    CacheChecksumError,
    CacheError,
    CacheNotFoundError,
    CachePathError,
    CacheVersionError,
    unknown_name,
)
from selfspec.store.contents import TokenizerInfo
from selfspec.store.files import FileEntry, open_inside

FORMAT_VERSION = 2
CARD_FILE = "cache.json"
LUT_FILE = "lut.safetensors"
CORPUS_FILE = "corpus.safetensors"
CALIBRATION_FILE = "calibration.json"
FITTED_FILE = "fitted.json"
FILES = (CALIBRATION_FILE, CORPUS_FILE, FITTED_FILE, LUT_FILE)

_MAX_BYTES = 1 << 24  # A larger file is no card.


@dataclass(frozen=True, kw_only=True)
class Card:
    """What `cache.json` says, checked."""

    tokenizer: TokenizerInfo
    num_ids: int  # This is 1 + the largest token id in any table.
    counts: Mapping[str, int]  # The numbers of rows, prefixes, rates and so on.
    about: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    top_k: int | None = None  # The entries of a LUT row.
    max_prefix: int | None = None  # The tokens of the longest corpus prefix.

    def to_bytes(self) -> bytes:
        """The bytes of the file, which are the same for the same card."""
        kinds = sorted(name.split(".")[0] for name in self.files)
        try:
            data = {"format_version": FORMAT_VERSION, "kinds": kinds, **self._as_dict()}
            data["checksum"] = checksum(data)
            text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheCardError(f"about must be what JSON can say (got: {error})") from error
        return f"{text}\n".encode("ascii")

    def _as_dict(self) -> dict[str, Any]:
        """The fields. `dataclasses.asdict` would copy `about`, and can't copy every dictionary."""
        files = {name: vars(entry) for name, entry in self.files.items()}
        mine = {"tokenizer": vars(self.tokenizer), "about": dict(self.about), "files": files}
        return {**vars(self), **mine}


def checksum(fields: Mapping[str, Any]) -> str:
    """The sha256 of a card's fields in canonical JSON, the field ``checksum`` itself left out.

    >>> checksum({"a": 1, "b": 2}) == checksum({"b": 2, "a": 1, "checksum": "5a"})
    True
    """
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def read_card(folder: Path) -> tuple[Card, bytes]:
    """The card of a folder, checked, and its bytes."""
    try:
        with open_inside(folder, CARD_FILE)[1] as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CacheNotFoundError(
            f"a cache folder must hold a {CARD_FILE} (got {str(folder)!r}: {error.strerror}); "
            "build one with 'selfspec cache build'"
        ) from error
    try:
        return _card(data, f"cache {str(folder)!r}"), data
    except CacheError:
        raise
    except (ValueError, RecursionError) as error:
        raise CacheCardError(
            f"{CARD_FILE} of cache {str(folder)!r} must be a card that selfspec wrote: {error}; "
            "build or fetch the cache anew"
        ) from error


def _card(data: bytes, where: str) -> Card:
    """Reads the card, the version first, since the fields of a newer one may mean anything.

    What it says is looked at so far as a wrong value would end the program. Any other lie makes
    drafts worse, and no text.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError(f"at most {_MAX_BYTES} bytes (got more)")
    fields = json.loads(data.decode("utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON object (got {fields!r:.80})")
    version = _count(fields, "format_version", least=1)
    if version > FORMAT_VERSION:
        raise CacheVersionError(
            f"{where} must have format version {FORMAT_VERSION} or older (got {version}); upgrade "
            "selfspec, or build it anew"
        )
    if version > 1 or "checksum" in fields:  # Cards of version 1 may be without one.
        _check_sum(fields, where)
    tokenizer, counts, files = (_take(fields, n, dict) for n in ("tokenizer", "counts", "files"))
    for name in files:
        _check_name(name, where)
    return Card(
        tokenizer=TokenizerInfo(
            _take(tokenizer, "fingerprint", str),
            _take(tokenizer, "name", str),
            _count(tokenizer, "vocab_size"),
        ),
        num_ids=_count(fields, "num_ids"),
        counts={name: _count(counts, name) for name in counts},
        about=_take(fields, "about", dict),
        files={name: _entry(_take(files, name, dict)) for name in files},
        top_k=None if fields.get("top_k") is None else _count(fields, "top_k"),
        max_prefix=None if fields.get("max_prefix") is None else _count(fields, "max_prefix"),
    )


def _check_sum(fields: dict[str, Any], where: str) -> None:
    """Refuses a card that was changed."""
    said, found = _take(fields, "checksum", str), checksum(fields)
    if said != found:
        raise CacheChecksumError(
            f"{CARD_FILE} of {where} must have the checksum {said[:12]}… (got {found[:12]}…: it "
            "was changed or damaged); fetch or build it anew"
        )


def _check_name(name: str, where: str) -> None:
    if name in FILES:
        return
    if name in ("", ".", "..") or set(name) & set("/\\:\0"):  # On some platform it is a path.
        raise CachePathError(
            f"the card of {where} must name files in that folder (got {name!r}); do not use it"
        )
    raise ValueError(f"files it knows ({unknown_name('file', name, FILES)})")


def _entry(fields: dict[str, Any]) -> FileEntry:
    return FileEntry(_take(fields, "sha256", str), _count(fields, "size"))


def _count(fields: dict[str, Any], name: str, least: int = 0) -> int:
    value: int = _take(fields, name, int)
    if value < least:
        raise ValueError(f"{name} must be >= {least} (got {value})")
    return value


def _take(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} must be a {kind.__name__} (got {value!r:.80})")
    return value

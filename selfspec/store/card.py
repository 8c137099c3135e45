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
    CacheNotFoundError,
    CachePathError,
    CacheVersionError,
    unknown_name,
)
from selfspec.store.contents import TokenizerInfo
from selfspec.store.plain_files import LinkError, open_plain, path_inside

FORMAT_VERSION = 2
CARD_FILE = "cache.json"
LUT_FILE = "lut.safetensors"
CORPUS_FILE = "corpus.safetensors"
CALIBRATION_FILE = "calibration.json"
FITTED_FILE = "fitted.json"
FILES = (CALIBRATION_FILE, CORPUS_FILE, FITTED_FILE, LUT_FILE)

_MAX_BYTES = 1 << 24  # A larger file is no card.
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class FileEntry:
    """The checksum and the size that a file must have."""

    sha256: str
    size: int


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
        data = {
            "format_version": FORMAT_VERSION,
            "kinds": sorted(name.split(".")[0] for name in self.files),
            "tokenizer": vars(self.tokenizer),
            "num_ids": self.num_ids,
            "top_k": self.top_k,
            "max_prefix": self.max_prefix,
            "counts": dict(self.counts),
            "about": dict(self.about),
            "files": {name: vars(entry) for name, entry in self.files.items()},
        }
        try:
            data["checksum"] = checksum(data)
            text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheCardError(f"about must be what JSON can say (got: {error})") from error
        return f"{text}\n".encode("ascii")


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
        with open_plain(path_inside(folder, CARD_FILE)) as file:
            data = file.read(_MAX_BYTES + 1)
    except LinkError as error:
        raise CachePathError(
            f"{CARD_FILE} of cache {str(folder)!r} must lie in that folder (got {error.strerror}); "
            "put the file itself there"
        ) from error
    except OSError as error:
        raise CacheNotFoundError(
            f"a cache folder must hold a {CARD_FILE} (got {str(folder)!r}: {error.strerror}); "
            "build one with 'selfspec cache build'"
        ) from error
    return _Reader(str(folder)).card(data), data


class _Reader:
    """Takes a card apart. Each error names the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def card(self, data: bytes) -> Card:
        """Reads the card, the version first, since the fields of a newer one may mean anything."""
        fields = self._json(data)
        version = self._take(fields, "format_version", int)
        if version > FORMAT_VERSION:
            raise CacheVersionError(
                f"cache {self._folder!r} must have format version {FORMAT_VERSION} or older "
                f"(got {version}); upgrade selfspec, or build it anew"
            )
        if version < 1:
            raise self._wrong("format_version must be >= 1", version)
        self._check_sum(fields, version)
        return Card(
            tokenizer=self._tokenizer(self._take(fields, "tokenizer", dict)),
            num_ids=self._count(fields, "num_ids"),
            counts=self._counts(self._take(fields, "counts", dict)),
            about=self._take(fields, "about", dict),
            files=self._files(self._take(fields, "files", dict)),
            top_k=self._optional_count(fields, "top_k"),
            max_prefix=self._optional_count(fields, "max_prefix"),
        )

    def _json(self, data: bytes) -> dict[str, Any]:
        if len(data) > _MAX_BYTES:
            raise self._wrong(f"at most {_MAX_BYTES} bytes", "more")
        try:
            fields = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._wrong("JSON", error) from error
        if not isinstance(fields, dict):
            raise self._wrong("a JSON object", fields)
        return fields

    def _check_sum(self, fields: dict[str, Any], version: int) -> None:
        """Refuses a card that was changed. Cards of version 1 may be without a checksum."""
        if version == 1 and "checksum" not in fields:
            return
        said = self._digest(fields, "checksum")
        try:
            found = checksum(fields)
        except RecursionError as error:  # What could just be read may be too deep to be written.
            raise self._wrong("JSON", error) from error
        if said != found:
            raise CacheChecksumError(
                f"{CARD_FILE} of cache {self._folder!r} must have the checksum {said[:12]}… "
                f"(got {found[:12]}…: it was changed or damaged); fetch or build it anew"
            )

    def _tokenizer(self, fields: dict[str, Any]) -> TokenizerInfo:
        return TokenizerInfo(
            self._digest(fields, "fingerprint"),
            self._take(fields, "name", str),
            self._count(fields, "vocab_size"),
        )

    def _counts(self, fields: dict[str, Any]) -> dict[str, int]:
        return {name: self._count(fields, name) for name in fields}

    def _files(self, fields: dict[str, Any]) -> dict[str, FileEntry]:
        for name in fields:
            if not _is_inside(name):
                raise CachePathError(
                    f"the card of cache {self._folder!r} must name files in that folder "
                    f"(got {name!r}); do not use it"
                )
            if name not in FILES:
                raise self._wrong("files it knows", unknown_name("file", name, FILES))
        return {name: self._file(self._take(fields, name, dict)) for name in fields}

    def _file(self, fields: dict[str, Any]) -> FileEntry:
        return FileEntry(self._digest(fields, "sha256"), self._count(fields, "size"))

    def _digest(self, fields: dict[str, Any], name: str) -> str:
        value: str = self._take(fields, name, str)
        if len(value) != 64 or not _HEX.issuperset(value):
            raise self._wrong(f"{name} must be 64 hex digits", value)
        return value

    def _optional_count(self, fields: dict[str, Any], name: str) -> int | None:
        return None if fields.get(name) is None else self._count(fields, name)

    def _count(self, fields: dict[str, Any], name: str) -> int:
        value: int = self._take(fields, name, int)
        if value < 0:
            raise self._wrong(f"{name} must be >= 0", value)
        return value

    def _take(self, fields: dict[str, Any], name: str, kind: type) -> Any:
        value = fields.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._wrong(f"{name} must be a {kind.__name__}", value)
        return value

    def _wrong(self, rule: str, got: object) -> CacheCardError:
        return CacheCardError(
            f"{CARD_FILE} of cache {self._folder!r} must be a card that selfspec wrote: {rule} "
            f"(got {str(got)[:80]!r}); build or fetch the cache anew"
        )


def _is_inside(name: str) -> bool:
    """Is it the plain name of a file, on any platform?"""
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0")

"""Finds what a recipe's `data` names: files in order, or a name for `datasets`; and how much it is.

Reads no document, so that a wrong path is refused before any work.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from selfspec.building.plain import PACKED, PIECE
from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError

_BUILDERS = ("arrow", "csv", "json", "parquet", "text")
_KINDS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".tsv": "tsv",
}
_ABOUT_FILES = ("readme", "licence", "license")  # Such files lie beside the data and are left out.
_BLOCK = 1 << 20  # Bytes in which lines are counted at a time.
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class Inputs:
    """What is read: local files of one kind, or a name that `datasets` knows."""

    kind: str  # The name of a builder, "tsv", "hub", or "vocabulary".
    files: tuple[Path, ...] = ()
    addresses: tuple[str, ...] = ()  # Globs or URLs that `datasets` resolves.

    def fingerprint(self) -> list[list[str | int]]:
        """Sizes and times, which show whether a file has changed without reading it."""
        stats = [(path, path.stat()) for path in self.files]
        return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def find_inputs(recipe: Recipe) -> Inputs:
    """The files or the name that a recipe's `data` and `data_files` mean."""
    inputs = _find(recipe)
    if inputs.kind == "text" and recipe.messages is not None:
        raise BuildError(
            f"messages must be read from rows, as JSON or Parquet has them (got {recipe.data!r}, "
            "which is plain text)"
        )
    return inputs


def _find(recipe: Recipe) -> Inputs:
    if recipe.reads_vocabulary:
        return Inputs("vocabulary")
    path = Path(recipe.data).expanduser()
    if recipe.data in _BUILDERS:
        return _of_builder(recipe)
    if path.is_file():
        return _local(recipe, [path])
    if path.is_dir():
        return _local(recipe, _files_in(path, recipe.data_files))
    if not _HUB_ID.fullmatch(recipe.data) or recipe.data.startswith("."):
        rule = "a file or folder that exists, a Hub id such as 'owner/name', or one of "
        raise BuildError(f"data must be {rule}{', '.join(_BUILDERS)} (got {recipe.data!r})")
    return Inputs("hub", addresses=recipe.data_files)


def _of_builder(recipe: Recipe) -> Inputs:
    if not recipe.data_files:
        raise BuildError(f"data {recipe.data!r} must come with data_files; pass --data-files")
    if any("://" in each for each in recipe.data_files):
        return Inputs(recipe.data, addresses=recipe.data_files)
    found: set[Path] = set()
    for pattern in recipe.data_files:
        matches = glob.glob(str(Path(pattern).expanduser()), recursive=True)
        files = {Path(match) for match in matches if Path(match).is_file()}
        if not files:
            raise BuildError(f"data_files must name files that exist (got {pattern!r})")
        found |= files
    return _local(recipe, sorted(found), recipe.data)


def _local(recipe: Recipe, files: list[Path], kind: str | None = None) -> Inputs:
    if recipe.split != "train":
        raise BuildError(
            f"split must be 'train' where files are read (got {recipe.split!r}); "
            "choose among them with data_files"
        )
    kind = kind or _kind_of_all(files)
    if kind in _KINDS.values() and recipe.data not in _BUILDERS:
        files = [path for path in files if _kind(path) == kind]
    return Inputs(kind, tuple(files))


def _files_in(folder: Path, globs: tuple[str, ...]) -> list[Path]:
    """The files of a folder in the order of their names, hidden ones left out."""
    found = {path for pattern in globs or ("**/*",) for path in _matches(folder, pattern)}
    files = sorted(path for path in found if path.is_file() and not _hidden(path, folder))
    if not files:
        wanted = f" that match {list(globs)}" if globs else ""
        raise BuildError(f"data folder must hold files{wanted} (got {str(folder)!r})")
    return files


def _matches(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except (NotImplementedError, ValueError) as error:
        rule = "data_files must be globs inside the data folder"
        raise BuildError(f"{rule} (got {pattern!r})") from error


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _kind_of_all(files: list[Path]) -> str:
    kinds = {path: _kind(path) for path in files}
    counts = Counter(kinds.values())
    if set(counts) == {"text"}:
        return "text"
    for path in files:
        if kinds[path] == "text" and path.name.lower().startswith(_ABOUT_FILES):
            counts["text"] -= 1
    left = sorted(kind for kind, count in counts.items() if count)
    if len(left) > 1:
        raise BuildError(
            f"data files must be of one kind (got {', '.join(left)}); "
            "choose with data_files, such as '**/*.jsonl'"
        )
    return left[0]


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (*PACKED, ".zst"):
        suffixes.pop()
    return _KINDS.get(suffixes[-1], "text") if suffixes else "text"


def num_documents(recipe: Recipe, inputs: Inputs) -> int | None:
    """The number of documents or an estimate, for the bars; None if all would have to be read."""
    counts = [_in_file(path, inputs.kind, recipe.form) for path in inputs.files]
    known = None if None in counts or not counts else sum(count or 0 for count in counts)
    limits = [each for each in (known, recipe.max_documents) if each is not None]
    return min(limits, default=None)


def _in_file(path: Path, kind: str, form: str) -> int | None:
    if kind == "parquet":
        from pyarrow.parquet import read_metadata

        return int(read_metadata(path).num_rows)
    if path.suffix in PACKED or path.suffix == ".zst" or kind == "arrow":
        return None
    if kind == "text" and form == "document":
        return path.stat().st_size // PIECE + 1
    if kind == "text" and form == "paragraph":
        return None
    return _num_lines(path)


def _num_lines(path: Path) -> int | None:
    """The number of lines; None for JSON that is one list, or that is all on one line."""
    num_lines = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            if not num_lines and block.lstrip()[:1] == b"[":
                return None
            num_lines += block.count(b"\n")
    return num_lines or None

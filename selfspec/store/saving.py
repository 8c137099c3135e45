"""Writes a cache folder: whole or not at all, and the same bytes for the same contents."""

from __future__ import annotations

import json
import os
from pathlib import Path

from selfspec.errors import CacheExistsError, CacheWriteError
from selfspec.machine.user_files import sync
from selfspec.store.card import (
    CALIBRATION_FILE,
    CARD_FILE,
    CORPUS_FILE,
    FILES,
    FITTED_FILE,
    LUT_FILE,
    Card,
)
from selfspec.store.contents import CacheContents
from selfspec.store.files import entry_of
from selfspec.store.swap import put_in_place, scratch_folder
from selfspec.store.tables import joined
from selfspec.store.tensors import write_tensors


def save_cache(
    folder: str | os.PathLike[str],
    contents: CacheContents,
    *,
    overwrite: bool = False,
    private: bool = False,
) -> None:
    """Writes a cache folder under another name beside `folder` and renames it when it is on disk.

    With `overwrite`, readers see the old folder or the new one, and of several writers the last
    one wins. A killed writer leaves a hidden folder beside the target, never half a cache. With
    `private`, only the owner can read the folder.
    """
    target = check_target(folder, overwrite=overwrite)
    try:
        with scratch_folder(target, 0o700 if private else 0o777) as scratch:
            write_files(scratch, contents)
            if private:
                for path in scratch.iterdir():
                    path.chmod(0o600)
            put_in_place(scratch, target, overwrite=overwrite)
    except FileExistsError as error:
        raise _taken(target) from error
    except OSError as error:
        raise CacheWriteError(
            f"a cache folder must be writable at {str(target)!r} (got: {error.strerror or error})"
        ) from error


def check_target(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """The folder to write to, with links resolved; refuses one that exists, before any work.

    An empty folder is free. Nothing but a cache folder is ever overwritten.
    """
    target = Path(folder).expanduser().resolve()
    names = _names_at(target)
    if names and not overwrite:
        raise _taken(target)
    strange = sorted(set(names) - {CARD_FILE, *FILES})
    if strange or (names and CARD_FILE not in names):
        got = f"with {strange[0]!r} in it" if strange else f"without {CARD_FILE}"
        raise CacheExistsError(
            f"what is overwritten must be a cache folder with no other files (got {str(target)!r} "
            f"{got}); name another folder"
        )
    return target


def _names_at(target: Path) -> list[str]:
    """The names in a folder; for a file its own name, and an empty list if nothing is there.

    It asks only once, since another writer may take the folder away at any moment.
    """
    try:
        return os.listdir(target)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        return [target.name] if os.path.lexists(target) else []


def write_files(folder: Path, contents: CacheContents) -> None:
    """Writes the files, and then the card, into an empty folder; all is on disk afterwards."""
    if contents.tables:
        write_tensors(folder / LUT_FILE, joined(contents.tables))
    if contents.corpus is not None:
        write_tensors(folder / CORPUS_FILE, contents.corpus.arrays())
    if contents.calibration:
        _write_json(folder / CALIBRATION_FILE, contents.calibration)
    if contents.fitted is not None:
        _write_json(folder / FITTED_FILE, contents.fitted.as_dict())
    card = Card(
        tokenizer=contents.tokenizer,
        about=contents.about,
        files={name: entry_of(folder / name) for name in FILES if (folder / name).exists()},
        **contents.facts(),
    )
    (folder / CARD_FILE).write_bytes(card.to_bytes())
    for path in (*folder.iterdir(), folder):
        sync(path)


def _write_json(path: Path, values: object) -> None:
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    path.write_text(text + "\n", encoding="ascii", newline="\n")


def _taken(target: Path) -> CacheExistsError:
    return CacheExistsError(
        f"the path of a new cache folder must be free (got {str(target)!r}, which exists); name "
        "another folder, or replace it with overwrite=True (on a command line --overwrite)"
    )

"""The work folder beside a cache that is being built: one process at a time, and a journal.

The journal says what is built and how far that is. It is replaced whole, so that a process that
is killed at any moment leaves the old journal or the new one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from selfspec.errors import BuildError
from selfspec.machine.user_files import replacing

_FORMAT = 1


class WorkFolder:
    """A locked work folder.

    Attributes:
        folder: Holds the parts of the cache until all of them are there.
        progress: How far each stage is, as `note` wrote it down.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.progress: dict[str, dict[str, Any]] = {}
        self._identity = identity
        self._journal = folder / "journal.json"
        self._read()

    def note(self, stage: str, progress: dict[str, Any]) -> None:
        """Writes down how far a stage is; a later start goes on from there."""
        self.progress[stage] = progress
        journal = {"format": _FORMAT, "identity": self._identity, "progress": self.progress}
        with replacing(self._journal) as file:
            file.write(json.dumps(journal, indent=1).encode())

    def part(self, name: str) -> Path:
        """The folder of one stage, made if it is missing."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def _read(self) -> None:
        if not self._journal.exists():
            return
        try:
            journal = json.loads(self._journal.read_text(encoding="utf-8"))
            known, self.progress = dict(journal["identity"]), dict(journal["progress"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise self._begin_anew("its journal can't be read") from error
        changed = [
            f"{key} was {_short(known.get(key))}, is {_short(self._identity.get(key))}"
            for key in sorted({*known, *self._identity})
            if known.get(key) != self._identity.get(key)
        ]
        if changed:
            raise self._begin_anew("; ".join(changed))

    def _begin_anew(self, reason: str) -> BuildError:
        return BuildError(
            f"{str(self.folder)!r} holds another build ({reason}); "
            "undo the change to go on with it, or pass --restart to begin anew"
        )


@contextmanager
def open_work_folder(
    output: Path, identity: Mapping[str, Any], *, restart: bool
) -> Iterator[WorkFolder]:
    """The work folder of a cache folder, made or found again, locked for other processes."""
    folder = output.parent / f"{output.name}.building"

    def refused(holder: str) -> BuildError:
        return BuildError(
            f"{str(output)!r} is being built by {holder}; wait for it, or build elsewhere"
        )

    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / "lock", refused))
        except OSError as error:
            raise BuildError(
                f"output must be in a folder that can be written (got {str(output)!r}: "
                f"{error.strerror})"
            ) from error
        if restart:
            _clear(folder)
        # A later process will compare with what JSON makes of it.
        yield WorkFolder(folder, json.loads(json.dumps(identity)))


@contextmanager
def locked(path: Path, refused: Callable[[str], Exception]) -> Iterator[None]:
    """Keeps other processes out; raises what `refused` makes of the name of the one that is in."""
    from filelock import FileLock, Timeout

    path.touch()
    holder = ""
    with suppress(OSError):  # An attempt to lock the file may empty it.
        holder = path.read_text(encoding="utf-8", errors="replace")[:80]
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise refused(holder or "another process") from error
    try:
        with suppress(OSError):
            path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        lock.release()


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"

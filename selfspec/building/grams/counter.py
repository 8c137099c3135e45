"""Counts the n-grams of documents in sorted runs on disk, and turns runs into corpus tables."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfspec.building.grams.grouping import Grouping
from selfspec.building.grams.keys import GramKeys, add_up
from selfspec.building.grams.levels import Levels
from selfspec.building.grams.runs import Run, merged, write_run
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.machine.user_files import replacing

_MAX_PREFIX = 8
_MAX_BLOCK = 1 << 20  # n-grams merged at once; more would not be faster.

_SCRATCH = "merging-"

Progress = Callable[[int, int], None]  # It gets the n-grams read and those in all.


class GramCounter:
    """Counts what follows each prefix of 1 to `max_prefix` tokens; n-grams stay in a document.

    `folder` holds the runs. Runs that are there already count too, or only those named in `runs`;
    the others are deleted. `max_memory` bounds the working arrays in bytes, whatever the corpus;
    `tables` takes some seven times the size of its result on top. The same documents give the
    same tables, byte for byte, whatever the memory, the runs and the order of documents.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        vocab_size: int,
        max_prefix: int = 4,
        max_memory: int = 1 << 29,
        runs: Collection[str] | None = None,
    ) -> None:
        if not 1 <= max_prefix <= _MAX_PREFIX:
            raise ValueError(f"max_prefix must be 1 to {_MAX_PREFIX} (got {max_prefix})")
        if not 1 <= vocab_size < 1 << 32:
            raise ValueError(f"vocab_size must be 1 to 2**32 - 1 (got {vocab_size})")
        self.folder = Path(folder)
        self._vocab_size = vocab_size
        self._overlap = max_prefix  # The tokens of an n-gram after its first.
        self._keys = GramKeys(vocab_size, max_prefix + 1)
        self._max_rows = max(max_memory // (48 + 24 * self._keys.num_words), 8 * max_prefix)
        self._stored = np.zeros(self._max_rows, np.uint32)  # Ids plus one; 0 ends a document.
        self._used = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self.runs = self._clean(runs)

    @property
    def full(self) -> bool:
        """Is it time to call `flush`? Otherwise `add` writes runs when memory is used up.

        A run that `add` writes may end within a document; one from `flush` never does.
        """
        return self._used > self._max_rows * 3 // 4

    def add(self, token_ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Counts one document."""
        stored = self._checked(token_ids)
        if not len(stored):
            return
        while len(stored) > (room := max(self._max_rows - self._used - self._overlap, 0)):
            self._append(stored[:room])
            stored = stored[room:]
            self._write()
        self._append(stored)
        self._append(np.zeros(self._overlap, np.uint32))

    def flush(self) -> Path | None:
        """Writes what was added since the last run; returns the new run, or None if it is empty."""
        if self._used <= self._overlap:
            return None
        return self._write()

    def take_run(self, data: bytes) -> None:
        """Adds a run that another counter of the same settings wrote, as the bytes of its file."""
        path = self._next_path()
        with replacing(path) as file:
            file.write(data)
        Run(path, self._keys.num_words)  # Refuses what is no whole run.
        self.runs.append(path.name)

    def tables(
        self,
        *,
        min_count: int = 2,
        max_continuations: int = 8,
        max_bytes: int = 64_000_000,
        progress: Progress | None = None,
    ) -> CorpusTables:
        """The tables of all that was counted. Their `min_counts` say what was left out to fit.

        Each length of prefix starts with `min_count`. It is raised while the file would be larger
        than `max_bytes`, for the longest prefixes first.
        """
        token_dtype = np.dtype(np.uint16 if self._vocab_size <= 1 << 16 else np.uint32)
        limits = (min_count, max_continuations, max_bytes)
        levels = Levels(self._overlap, token_dtype, *limits)
        self.flush()
        grouping = Grouping(self._keys, levels)
        runs = [Run(self.folder / name, self._keys.num_words) for name in self.runs]
        rows = min(self._max_rows // 4 + 1, _MAX_BLOCK)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self.folder) as scratch:
            for block in merged(runs, self._keys.num_words, rows, Path(scratch)):
                grouping.add(block)
                if progress is not None:
                    progress(sum(r.num_read for r in runs), sum(r.num_grams for r in runs))
        grouping.finish()
        return levels.tables()

    def _checked(self, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint32]:
        """The tokens of a document as they are stored; refuses ids outside of the vocabulary."""
        ids = np.asarray(token_ids, np.int64)
        for odd in (ids.min(), ids.max()) if ids.size else ():
            if not 0 <= odd < self._vocab_size:
                raise ValueError(f"token ids must be 0 to {self._vocab_size - 1} (got {odd})")
        return (ids + 1).astype(np.uint32)

    def _append(self, stored: NDArray[np.uint32]) -> None:
        self._stored[self._used : self._used + len(stored)] = stored
        self._used += len(stored)

    def _write(self) -> Path:
        """Writes a run of all n-grams but those of the last tokens, which stay for the next one."""
        stored = self._stored[: self._used]
        words = self._keys.pack(stored)
        block = add_up(words[:, stored[: words.shape[1]] > 0])
        path = self._next_path()
        write_run(path, [block])
        self.runs.append(path.name)
        stored[: self._overlap] = stored[-self._overlap :]
        self._used = self._overlap
        return path

    @property
    def _suffix(self) -> str:
        """The end of the names of runs. It names the settings, since runs fit no other ones."""
        return f".v{self._vocab_size}.n{self._overlap}.run"

    def _next_path(self) -> Path:
        index = 1 + max((int(name.split(".")[0]) for name in self.runs), default=-1)
        return self.folder / f"{index:06d}{self._suffix}"

    def _clean(self, wanted: Collection[str] | None) -> list[str]:
        """The runs that count; deletes other runs and what an interrupted count left."""
        found = {path.name for path in self.folder.glob("*.run")}
        if lost := sorted(set(wanted or ()) - found):
            raise FileNotFoundError(f"{self.folder} must hold the run {lost[0]}; count again")
        names = sorted(found if wanted is None else wanted)
        if odd := [name for name in names if not name.endswith(self._suffix)]:
            raise ValueError(f"runs must be *{self._suffix} (got {odd[0]}); use another folder")
        for path in [
            *self.folder.glob("*.tmp"),
            *(self.folder / name for name in found - {*names}),
        ]:
            path.unlink()
        for path in self.folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(path)
        return names

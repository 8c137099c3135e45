"""Keeps sorted n-grams with their counts in files, called runs, and merges them in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from selfspec.building.grams.keys import Counted, Words, add_up
from selfspec.machine.user_files import replacing

_WRITTEN_ROWS = 1 << 18
_FAN_IN = 64  # The most runs merged at once; more are merged in stages.
_FOOTER = np.dtype("<u8")  # The number of n-grams.
_ENTRY = np.dtype("<u8")


class Run:
    """A file of n-grams: the words and the count of each, and at the end the number of them."""

    def __init__(self, path: Path, num_words: int) -> None:
        self.path = path
        self.num_read = 0
        self._columns = num_words + 1
        size = path.stat().st_size
        body = size - _FOOTER.itemsize
        self.num_grams = body // self._row_bytes
        footer = np.fromfile(path, _FOOTER, offset=max(body, 0))
        if footer.tolist() != [self.num_grams] or body % self._row_bytes:
            raise ValueError(f"{path.name} must be a whole run of n-grams (got {size} bytes)")

    @property
    def _row_bytes(self) -> int:
        return self._columns * _ENTRY.itemsize

    def read(self, start: int, num_grams: int) -> Counted:
        """Reads up to `num_grams` n-grams from `start` on; fewer at the end of the file."""
        num_grams = min(num_grams, self.num_grams - start)
        count, offset = num_grams * self._columns, start * self._row_bytes
        rows = np.fromfile(self.path, _ENTRY, count=count, offset=offset)
        self.num_read += num_grams
        columns = np.ascontiguousarray(rows.reshape(num_grams, self._columns).T)
        return Counted(columns[:-1], columns[-1].astype(np.int64))


def write_run(path: Path, blocks: Iterable[Counted]) -> None:
    """Writes a run whole or not at all."""
    num_grams = 0
    with replacing(path) as file:
        for block in blocks:
            num_grams += len(block.counts)
            for start in range(0, len(block.counts), _WRITTEN_ROWS):
                part = slice(start, start + _WRITTEN_ROWS)
                columns = np.vstack([block.words[:, part], block.counts[part].view(_ENTRY)])
                np.ascontiguousarray(columns.T).tofile(file)
        np.array([num_grams], _FOOTER).tofile(file)


def merged(runs: Sequence[Run], num_words: int, max_rows: int, scratch: Path) -> Iterator[Counted]:
    """Yields the n-grams of all runs in order, each once, in blocks of at most `max_rows`.

    If there are many runs, groups of them are first merged into the folder `scratch`.
    """
    runs = list(runs)
    num_staged = 0
    while len(runs) > _FAN_IN:
        path = scratch / f"merged-{num_staged:06d}.run"
        write_run(path, _merged(runs[:_FAN_IN], max_rows))
        runs = [*runs[_FAN_IN:], Run(path, num_words)]
        num_staged += 1
    yield from _merged(runs, max_rows)


def _merged(runs: Sequence[Run], max_rows: int) -> Iterator[Counted]:
    readers = [_Reader(run, max(max_rows // len(runs), 1)) for run in runs if run.num_grams]
    while readers:
        # Up to the nearest end of a block, no run has anything left to read.
        ends = [reader.end for reader in readers if reader.unread]
        parts = [reader.take(min(ends, default=None)) for reader in readers]
        yield _joined(parts)
        readers = [reader for reader in readers if reader.refill()]


def _joined(parts: Sequence[Counted]) -> Counted:
    if len(parts) == 1:
        return parts[0]
    words = np.concatenate([part.words for part in parts], axis=1)
    return add_up(words, np.concatenate([part.counts for part in parts]))


class _Reader:
    """Reads one run in blocks, from which n-grams are taken in order."""

    def __init__(self, run: Run, block_rows: int) -> None:
        self._run = run
        self._block_rows = block_rows
        self._position = 0
        self._block = Counted(np.zeros((0, 0), np.uint64), np.zeros(0, np.int64))
        self.refill()

    @property
    def unread(self) -> int:
        """The number of n-grams that were not read yet."""
        return self._run.num_grams - self._position

    @property
    def end(self) -> tuple[int, ...]:
        """The words of the block's last n-gram."""
        return tuple(self._block.words[:, -1].tolist())

    def refill(self) -> bool:
        """Reads the next block if this one is used up; False if the run is used up too."""
        if not len(self._block.counts):
            self._block = self._run.read(self._position, self._block_rows)
            self._position += len(self._block.counts)
        return len(self._block.counts) > 0

    def take(self, end: tuple[int, ...] | None) -> Counted:
        """Takes the block's n-grams up to `end`, or all of them."""
        words, counts = self._block
        stop = len(counts) if end is None else _num_up_to(words, end)
        self._block = Counted(words[:, stop:], counts[stop:])
        return Counted(words[:, :stop], counts[:stop])


def _num_up_to(words: Words, end: tuple[int, ...]) -> int:
    """How many of the sorted n-grams are no greater than `end`; one bisection a word."""
    low, high = 0, int(words.shape[1])
    for word, bound in zip(words, end, strict=True):
        equal = word[low:high]
        value = np.uint64(bound)
        high = low + int(np.searchsorted(equal, value, "right"))
        low += int(np.searchsorted(equal, value, "left"))
    return high

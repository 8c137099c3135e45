"""Safetensors files: which tensors they hold, and their bytes read into memory.

Reads bypass the page cache if the file system allows that. Otherwise each read is dropped from the
cache afterwards, so that a file larger than memory does not fill it. Knows files and bytes; nothing
of models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from selfspec.errors import WeightsError
from selfspec.machine.hub import find_file

BLOCK = 4096  # Direct reads begin and end at multiples of this many bytes, also in memory.
CHUNK = 1 << 25  # One read takes at most this many bytes.
_HOW_TO_MEND = (
    "download the model again, or load it with from_pretrained() and save it with save_pretrained()"
)


class StoredTensor(NamedTuple):
    """A tensor in a file, or a range of its rows."""

    shard: Shard
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def part(self, which: int, number: int) -> StoredTensor:
        """The part number `which` of the rows, divided into `number` equal parts."""
        rows, *rest = self.shape or (1,)
        part = self._replace(shape=(rows // number, *rest)) if number > 1 else self
        return part._replace(offset=self.offset + which * part.num_bytes)


class Shard:
    """One open file; if it is one of safetensors, `tensors` holds what is in it by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tensors = self._find_tensors() if path.suffix == ".safetensors" else {}
            self._file = _opened(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{path} must be a whole safetensors file (got {error!r:.200}); {_HOW_TO_MEND}"
            ) from error
        self._state = self._now()

    @property
    def state(self) -> tuple[str, int, int]:
        """Where the file is, its size, and when it was written."""
        return str(self.path.resolve()), *self._state

    def close(self) -> None:
        self._file.close()

    def check(self) -> None:
        """Refuses a file that was written to since it was opened."""
        if self._now() != self._state:
            raise WeightsError(
                f"{self.path} must stay as it was when the model was loaded (it was changed since);"
                " load the model again"
            )

    def read(self, start: int, into: torch.Tensor) -> None:
        """Fills bytes (N,) with those from `start` on; fewer at the end of the file.

        `start`, N and the address of the bytes must be multiples of `BLOCK`.
        """
        self._file.seek(start)
        memory, done, end = _memory(into), 0, min(len(into), self._state[0] - start)
        while done < end:
            got = self._file.readinto(memory[done : done + CHUNK])
            done += got
            if not got or (got % BLOCK and done < end):
                raise WeightsError(
                    f"{self.path} must have {self._state[0]} bytes, as when the model was loaded "
                    f"(it ends at byte {start + done} now); load the model again"
                )
            if hasattr(os, "posix_fadvise"):  # Drops what was read, not what was read ahead.
                os.posix_fadvise(self._file.fileno(), 0, start + done, os.POSIX_FADV_DONTNEED)

    def _find_tensors(self) -> dict[str, StoredTensor]:
        """In a safetensors file the tensors come last, one after the other without gaps."""
        with safe_open(self.path, "pt") as file:
            # Nothing is read: the tensors refer to the file.
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
        stored, size = {}, sum(tensor.nbytes for tensor in tensors.values())
        offset = self.path.stat().st_size - size
        for name, tensor in tensors.items():
            stored[name] = StoredTensor(self, offset, tensor.dtype, tuple(tensor.shape))
            offset += tensor.nbytes
        return stored

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns


def find_files(name: str) -> list[Path]:
    """The safetensors files of a folder or of a repository on the Hub, downloaded if need be."""
    index = find_file(name, SAFE_WEIGHTS_INDEX_NAME)
    if index is not None:
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{index} must name the files of the weights (got {error!r:.200}); {_HOW_TO_MEND}"
            ) from error
        return [_required(name, shard) for shard in sorted(shards)]
    return [_required(name, SAFE_WEIGHTS_NAME)]


def check_complete(missing: Sequence[str]) -> None:
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(
            f"the files must hold all weights of the model (they lack {missing[0]!r}{more}); "
            "download the model again"
        )


def stored_bytes(name: str, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights in memory, in `dtype` or, without one, in that of the files."""
    with ExitStack() as opened:
        shards = [opened.enter_context(closing(Shard(path))) for path in find_files(name)]
        tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    return sum(tensor.numel * (dtype or tensor.dtype).itemsize for tensor in tensors)


def _required(name: str, file: str) -> Path:
    path = find_file(name, file)
    if path is None:
        raise WeightsError(f"{name!r} must hold {file} (it is missing); {_HOW_TO_MEND}")
    return path


def in_blocks(num_bytes: int) -> int:
    """The number, rounded up to a multiple of `BLOCK`."""
    return -(-num_bytes // BLOCK) * BLOCK


def aligned_buffer(num_bytes: int) -> torch.Tensor:
    """Bytes (N,) that direct reads can fill; N is a multiple of `BLOCK`."""
    num_bytes = in_blocks(num_bytes)
    buffer = torch.empty(num_bytes + BLOCK, dtype=torch.uint8, device="cpu")
    first = -buffer.data_ptr() % BLOCK
    return buffer[first : first + num_bytes]


def _memory(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()
    return memoryview(array)


def _opened(path: Path) -> FileIO:
    """A file whose reads bypass the page cache, if a first read shows that they can."""
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_DIRECT)
            file = FileIO(number, "rb")
            try:
                file.readinto(_memory(aligned_buffer(BLOCK)))
            except OSError:
                file.close()
                raise
            return file
    return FileIO(path, "rb")

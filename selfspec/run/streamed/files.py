"""Safetensors files: what is in them, and their bytes read into memory.

Reads bypass the page cache where the file system allows that; elsewhere they are dropped from it,
so that a file larger than memory does not fill it. Knows files and bytes; nothing of models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from selfspec.errors import WeightsError

__all__ = ["BLOCK", "Shard", "StoredTensor", "aligned_buffer", "bytes_of", "pinned_bytes"]

BLOCK = 4096  # Direct reads begin and end at multiples of this many bytes, also in memory.
_CHUNK = 1 << 25  # One read takes at most this many bytes.
_LONGEST_HEADER = 100_000_000  # What the safetensors library accepts.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_HOW_TO_MEND = "download the model again, or save it anew with save_pretrained()"


class StoredTensor(NamedTuple):
    """A tensor in a file, or a range of its rows."""

    shard: Shard
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes in the file."""
        return self.numel * self.dtype.itemsize


class Shard:
    """One open safetensors file; `tensors` holds what is in it by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._direct = -1
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise WeightsError(
                f"{path} must be a file that can be read (got: {error.strerror}); {_HOW_TO_MEND}"
            ) from error
        try:
            self._state = self._now()
            self.tensors = dict(self._read_header())
        except BaseException:
            self.close()
            raise
        self._direct = _open_direct(path)

    def close(self) -> None:
        """Closes the file; nothing can be read from it any more."""
        self._file.close()
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def check(self) -> None:
        """Refuses a file that was written to since it was opened."""
        if self._now() != self._state:
            raise WeightsError(
                f"{self.path} must stay as it was when the model was loaded (it was changed since);"
                " load the model again"
            )

    def read(self, start: int, into: memoryview) -> None:
        """Fills `into` with the bytes from `start` on; less at the end of the file.

        `start`, the buffer's address and its length must be multiples of `BLOCK`.
        """
        done, end = 0, min(len(into), self._state[0] - start)
        while done < end:
            got = self._read_some(start + done, into[done : done + _CHUNK])
            if not got:
                raise WeightsError(
                    f"{self.path} must have {self._state[0]} bytes, as when the model was loaded "
                    f"(it ends at byte {start + done} now); load the model again"
                )
            done += got

    def _read_some(self, start: int, into: memoryview) -> int:
        if self._direct >= 0 and start % BLOCK == 0:
            try:
                return os.preadv(self._direct, [into], start)
            except OSError:  # This file system opens files for direct reads but can't do them.
                os.close(self._direct)
                self._direct = -1
        self._file.seek(start)
        got = self._file.readinto(into) or 0
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, start + got, os.POSIX_FADV_DONTNEED)
        return int(got)

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _read_header(self) -> Iterable[tuple[str, StoredTensor]]:
        size = self._state[0]
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise WeightsError(f"{self.path} must be a safetensors file (got none); {_HOW_TO_MEND}")
        try:
            header = json.loads(self._file.read(length))
            header.pop("__metadata__", None)
            found = [(name, self._stored(entry, 8 + length)) for name, entry in header.items()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{self.path} must have the header of a safetensors file (got {error!r:.200}); "
                f"{_HOW_TO_MEND}"
            ) from error
        end = max((tensor.offset + tensor.num_bytes for _, tensor in found), default=0)
        if end > size:
            raise WeightsError(
                f"{self.path} must have {end} bytes, as its header says (got {size}: it was cut "
                f"off); {_HOW_TO_MEND}"
            )
        return found

    def _stored(self, entry: dict[str, Any], first: int) -> StoredTensor:
        start, end = (first + int(offset) for offset in entry["data_offsets"])
        tensor = StoredTensor(self, start, _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])))
        if end - start != tensor.num_bytes:
            raise ValueError(f"{end - start} bytes for shape {tensor.shape}")
        return tensor


def aligned_buffer(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Bytes (N,) on the CPU that direct reads can fill; N is a multiple of `BLOCK`."""
    num_bytes = -(-num_bytes // BLOCK) * BLOCK
    buffer = torch.empty(num_bytes + BLOCK, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    first = -buffer.data_ptr() % BLOCK
    return buffer[first : first + num_bytes]


def pinned_bytes(num_bytes: int) -> int:
    """What a pinned buffer takes: torch rounds pinned memory up to a power of two.

    >>> pinned_bytes(5_000)
    16384
    """
    return 1 << (-(-num_bytes // BLOCK) * BLOCK + BLOCK - 1).bit_length()


def bytes_of(buffer: torch.Tensor) -> memoryview:
    """The memory of a tensor of bytes (N,) on the CPU."""
    array: Any = buffer.numpy()
    return memoryview(array)


def _open_direct(path: Path) -> int:
    """A descriptor whose reads bypass the page cache; -1 if there is none."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return -1
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return -1

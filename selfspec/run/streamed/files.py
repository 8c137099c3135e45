"""Safetensors files: what is in them, and their bytes read into memory.

Reads bypass the page cache where the file system allows that; elsewhere they are dropped from it,
so that a file larger than memory does not fill it. Knows files and bytes; nothing of models.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from selfspec.compat.checkpoints import find_file
from selfspec.errors import WeightsError

__all__ = [
    "BLOCK",
    "Shard",
    "StoredTensor",
    "aligned_buffer",
    "bytes_of",
    "find_files",
    "pinned_bytes",
]

BLOCK = 4096  # Direct reads begin and end at multiples of this many bytes, also in memory.
_CHUNK = 1 << 25  # One read takes at most this many bytes.
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

    def part(self, which: int, number: int) -> StoredTensor:
        """One of `number` equal parts of its rows."""
        rows, *rest = self.shape or (1,)
        part = self._replace(shape=(rows // number, *rest)) if number > 1 else self
        return part._replace(offset=self.offset + which * part.num_bytes)


class Shard:
    """One open safetensors file; `tensors` holds what is in it by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, "pt"):  # Checks all but the names of dtypes.
                self.tensors = self._read_header()
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except (OSError, KeyError, SafetensorError) as error:
            raise WeightsError(
                f"{path} must be a whole safetensors file (got {error!r:.200}); {_HOW_TO_MEND}"
            ) from error
        self._state = self._now()
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

    def _read_header(self) -> dict[str, StoredTensor]:
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: StoredTensor(
                self,
                8 + length + entry["data_offsets"][0],
                _DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
            )
            for name, entry in header.items()
        }


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
    for old in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        if find_file(name, SAFE_WEIGHTS_NAME) is None and find_file(name, old) is not None:
            raise WeightsError(
                f"weights must be in safetensors files to be streamed (got {old} in {name!r}); "
                "load the model with from_pretrained() once, and save it with save_pretrained()"
            )
    return [_required(name, SAFE_WEIGHTS_NAME)]


def _required(name: str, file: str) -> Path:
    path = find_file(name, file)
    if path is None:
        raise WeightsError(f"{name!r} must hold {file} (it is missing); {_HOW_TO_MEND}")
    return path


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

"""Writes safetensors files through the library, and reads them as views into memory or a map.

What is small is read into memory. What is large is mapped, which opens at once and is shared by
all processes; if somebody cuts off such a file while it is mapped, the system ends the process. The
header is checked against the size of the file, which may come from anywhere.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from selfspec.store.contents import Arrays

_DTYPES = {
    "U8": "<u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
}
_MAX_HEADER = 1 << 20
_LARGE = 1 << 26  # Files of more bytes than this are mapped.


def write_tensors(path: Path, arrays: Arrays) -> None:
    """Writes arrays under their names; the same arrays give the same bytes."""
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    path.write_bytes(data)  # A file that safetensors writes itself can be read by its owner only.


def read_tensors(file: BinaryIO, size: int) -> dict[str, NDArray[Any]]:
    """Read-only views of a file's arrays. Of a large file only the header is read.

    Raises `ValueError`, which says what is wrong, if the file breaks the rules of the format.
    """
    header, start = _read_header(file, size)
    raw = _raw(file, size)
    spans: list[tuple[int, int]] = []
    views = {}
    for name, entry in header.items():
        dtype, shape, begin, end = _parse(name, entry, size - start)
        spans.append((begin, end))
        views[name] = raw[start + begin : start + end].view(dtype).reshape(shape)
    _check_tiling(spans, size - start)
    return views


def _raw(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """The bytes of a file, in memory or as a map."""
    if size > _LARGE:
        return np.memmap(file, np.uint8, mode="r", shape=(size,))
    file.seek(0)
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{size} bytes (got {len(data)}: it was cut off meanwhile)")
    return np.frombuffer(data, np.uint8)


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise ValueError(f"a header that fits into its {size} bytes (got {length} bytes)")
    try:
        header = json.loads(file.read(length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a header in JSON (got: {error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"a JSON object as header (got {str(header)[:40]!r})")
    header.pop("__metadata__", None)
    return header, 8 + length


def _parse(name: str, entry: Any, size: int) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """The dtype and the shape of an array, and where it lies, in bytes after the header."""
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"dtype, shape and data_offsets of {name!r}") from error
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise ValueError(f"a known dtype for {name!r} (got {str(kind)[:40]!r})")
    dtype = np.dtype(_DTYPES[kind])
    if not isinstance(shape, list) or not all(_is_size(n) for n in [*shape, begin, end]):
        raise ValueError(f"whole numbers as shape and offsets of {name!r}")
    # Python's own numbers are used, since a hostile shape could make numpy's overflow.
    if not begin <= end <= size or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets of {name!r} that fit its shape and the file")
    return dtype, tuple(shape), begin, end


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_tiling(spans: list[tuple[int, int]], size: int) -> None:
    """Checks that arrays lie end to end: no gaps, no overlaps, and nothing after the last."""
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise ValueError(f"arrays that lie end to end (got a break at byte {position})")
        position = end
    if position != size:
        raise ValueError(f"arrays that fill the file (got {size - position} bytes more)")

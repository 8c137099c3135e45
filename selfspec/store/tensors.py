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

    Raises `ValueError`, which says what is wrong, if a view would not lie in the file.
    """
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
    arrays = _raw(file, size)[8 + length :]
    return {name: _view(arrays, name, entry) for name, entry in header.items()}


def _raw(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """The bytes of a file, in memory or as a map."""
    if size > _LARGE:
        return np.memmap(file, np.uint8, mode="r", shape=(size,))
    file.seek(0)
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{size} bytes (got {len(data)}: it was cut off meanwhile)")
    return np.frombuffer(data, np.uint8)


def _view(raw: NDArray[np.uint8], name: str, entry: Any) -> NDArray[Any]:
    """One array. The size is reckoned in Python's numbers, since numpy's could overflow."""
    try:
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        if not 0 <= begin <= end <= len(raw) or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError("they do not")
        view: NDArray[Any] = raw[begin:end].view(dtype).reshape(shape)
        return view
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        rule = f"a known dtype for {name!r:.80}, and a shape and offsets that fit the file"
        raise ValueError(f"{rule} (got {entry!r:.80})") from error

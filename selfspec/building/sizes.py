"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from typing import Any

from selfspec.errors import BuildError

__all__ = ["num_bytes"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE | re.ASCII)


def num_bytes(name: str, value: Any) -> int:
    """The number of bytes in ``"64MB"``, ``"1.5 G"`` or a plain number.

    >>> num_bytes("max_size", "1.5GB")
    1500000000
    """
    match = _SIZE.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise BuildError(f"{name} must be a size such as 64MB or 2GB (got {value!r})")
    return size

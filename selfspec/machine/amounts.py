"""Amounts of memory, as users write them."""

from __future__ import annotations

import re

from selfspec.errors import ConfigError

__all__ = ["amount_in_bytes"]

_UNITS = {"": 1, "k": 1, "m": 2, "g": 3, "t": 4}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]?)(i?)b)\s*", re.IGNORECASE)


def amount_in_bytes(max_memory: int | str, whole: int | None = None) -> int:
    """Reads bytes, or text such as ``"2GB"``, ``"500MiB"`` or ``"25%"`` of the whole, if any.

    >>> amount_in_bytes("1.5GB"), amount_in_bytes("2 KiB"), amount_in_bytes("25%", 400)
    (1500000000, 2048, 100)
    """
    if isinstance(max_memory, str) and (match := _AMOUNT.fullmatch(max_memory)):
        number, percent, unit, binary = match.groups()
        if percent and whole is not None:
            return int(whole * float(number) / 100)
        if not percent:
            thousand, power = (1024 if binary else 1000), _UNITS[unit.lower()] if unit else 0
            return int(float(number) * thousand**power)
    if isinstance(max_memory, int) and not isinstance(max_memory, bool) and max_memory > 0:
        return max_memory
    examples = "'2GB' or '500MB'" if whole is None else "'2GB', '500MB' or '25%'"
    raise ConfigError(
        f"max_memory must be a number of bytes, or text such as {examples} (got {max_memory!r})"
    )

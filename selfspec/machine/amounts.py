"""Amounts of memory, as users write them: one grammar for every option and argument."""

from __future__ import annotations

import re

from selfspec.errors import ConfigError

__all__ = ["amount_in_bytes"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_AMOUNT = re.compile(
    r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:(%)|(?:([kmgt])(i?))?b?)\s*", re.IGNORECASE | re.ASCII
)


def amount_in_bytes(
    amount: int | str, whole: int | None = None, *, name: str = "max_memory"
) -> int:
    """Reads bytes, or text such as ``"2GB"``, ``"64M"``, ``"500MiB"``, or ``"25%"`` of a whole.

    `name` is what the amount is called in the error. Without a `whole` there is nothing to take a
    share of.

    >>> amount_in_bytes("1.5GB"), amount_in_bytes("2 KiB"), amount_in_bytes("25%", 400)
    (1500000000, 2048, 100)
    """
    found = _read(amount, whole)
    if found < 1:
        examples = "'2GB', '64M' or '500MiB'" + (" or '25%'" if whole is not None else "")
        raise ConfigError(
            f"{name} must be a number of bytes, or text such as {examples} (got {amount!r:.80})"
        )
    return found


def _read(amount: int | str, whole: int | None) -> int:
    """The number of bytes; 0 for what is none."""
    if isinstance(amount, int) and not isinstance(amount, bool):
        return amount
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if match is None:
        return 0
    number, percent, unit, binary = match.groups()
    if percent:
        return 0 if whole is None else int(whole * float(number) / 100)
    thousand = 1024 if binary else 1000
    return int(float(number) * thousand ** _POWERS[(unit or "").lower()])

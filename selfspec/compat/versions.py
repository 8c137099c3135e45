"""Which versions of transformers selfspec was tried with. Imports no torch.

torch has no upper bound. On a CPU, all tests were run with torch 2.13 and the fast ones with
2.14.1; 2.15 was not tried.
"""

from __future__ import annotations

# pyproject.toml allows the same range; a test compares the two.
OLDEST = (5, 17)
UNTRIED = (5, 25)  # The first minor version that nobody has tried.


def untried_reason(version: str) -> str | None:
    """A warning about a version of transformers that selfspec was not tried with, or None.

    >>> untried_reason("5.24.1") is None
    True
    >>> untried_reason("5.25.0.dev0")
    'selfspec was tried with transformers 5.17 to 5.24, and this is 5.25.0.dev0'
    """
    major, minor, *_ = version.split(".")
    if OLDEST <= (int(major), int(minor)) < UNTRIED:
        return None
    first, last = f"{OLDEST[0]}.{OLDEST[1]}", f"{UNTRIED[0]}.{UNTRIED[1] - 1}"
    return f"selfspec was tried with transformers {first} to {last}, and this is {version}"

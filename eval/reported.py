"""What papers say of their own methods, on their own models and machines.

Stands beside a run's figures for comparison and is never mixed with them: other models, other
hardware, other prompts. Only claims that are known for sure are here; tables are not.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["reported"]

_BY_METHOD = {
    "lut-static": "Token Recycling (Luo et al., 2024): about 2x stock's speed at every model size "
    "that it was tried on, with less than 2 MB of tables",
}
_BY_STUDY = {
    "widths": "Ghidorah (2025): decoding up to 7.6x as fast as one token at a time on a Jetson NX, "
    "by drafts and by sharing each forward between its processors",
}


def reported(methods: Iterable[str], study: str | None = None) -> list[str]:
    """A line for each claim about what a run compares.

    >>> reported(["stock", "selfspec"])
    []
    """
    lines = [_BY_METHOD[name] for name in methods if name in _BY_METHOD]
    return lines + ([_BY_STUDY[study]] if study in _BY_STUDY else [])

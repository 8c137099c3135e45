"""The control groups of Linux above this process, which limit what containers may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "numbers_in"]


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folders of the groups that have a controller, and whether they are of version 2.

    Version 1 has a tree of groups for each controller, and version 2 one tree for all.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # Only Linux has this file.
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        is_second = not controllers
        if not is_second and controller not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / ("" if is_second else controller)
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            yield folder.joinpath(*parts[:depth]), is_second


def numbers_in(folder: Path, *names: str) -> list[float]:
    """The numbers in some files of a group; none if a file is missing or has none, as "max"."""
    try:
        texts = [(folder / name).read_text(encoding="utf-8") for name in names]
        return [float(word) for word in " ".join(texts).split()]
    except (OSError, ValueError):
        return []

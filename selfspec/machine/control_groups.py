"""The control groups of Linux above this process, which limit what containers may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path


def limits_of_groups(
    controller: str, second: Sequence[str], first: Sequence[str], root: Path = Path("/")
) -> Iterator[tuple[float, float, Path]]:
    """The two numbers of the groups that have a limit, from its files, and the folder of these.

    The files are named `second` in version 2, which has one tree of groups for all controllers, and
    `first` in version 1, which has a tree for every controller.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # Only Linux has this file.
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            group = folder.joinpath(*parts[:depth])
            try:
                texts = [(group / name).read_text() for name in (first if controllers else second)]
                number, other = (float(word) for word in " ".join(texts).split())
            except (OSError, ValueError):  # A file is missing, or says "max".
                continue
            yield number, other, group

"""Amounts of memory: as users write them, how much is free, and what a process gives back.

Containers are limited by the control groups of Linux above this process.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ByteSize, TypeAdapter

from selfspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

_BYTES = TypeAdapter(ByteSize)


def amount_in_bytes(
    amount: int | str, whole: int | None = None, *, name: str = "max_memory"
) -> int:
    """Reads bytes, or text such as ``"2GB"``, ``"64M"``, ``"500MiB"``, or ``"25%"`` of a whole.

    `name` is what the amount is called in the error. Without `whole`, a share is refused.

    >>> amount_in_bytes("1.5GB"), amount_in_bytes("2 KiB"), amount_in_bytes("25%", 400)
    (1500000000, 2048, 100)
    """
    try:
        num_bytes = 0 if isinstance(amount, bool) else _read(amount, whole)
    except (OverflowError, ValueError):
        num_bytes = 0
    if num_bytes < 1:
        examples = "'2GB', '64M' or '25%'" if whole is not None else "'2GB' or '64M'"
        raise ConfigError(
            f"{name} must be a number of bytes, or text such as {examples} (got {amount!r:.80})"
        )
    return num_bytes


def _read(amount: int | str, whole: int | None) -> int:
    if isinstance(amount, str) and "%" in amount:
        # Rounded up, so that any share is one byte at least.
        share = float(amount.strip().removesuffix("%"))
        return 0 if whole is None else math.ceil(whole * share / 100)
    return int(_BYTES.validate_python(amount))


def free_memory(device: torch.device | None = None, root: Path = Path("/")) -> int:
    """The free bytes of a GPU or of this machine, or of this container if it has fewer."""
    if device is not None and device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept  # Torch's allocator keeps some.
    import psutil

    free = int(psutil.virtual_memory().available)
    second = ["memory.max", "memory.current"]
    first = ["memory.limit_in_bytes", "memory.usage_in_bytes"]
    for most, used, group in limits_of_groups("memory", second, first, root):
        free = min(free, max(int(most - used) + _clean_files(group), 0))
    return free


def _clean_files(group: Path) -> int:
    """The bytes of files that Linux keeps in memory for a group, and drops if it needs memory.

    They count as used, and are all that many containers use. What was not written back yet stays.
    """
    try:
        words = (group / "memory.stat").read_text(encoding="utf-8").split()
        numbers = {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}
    except (OSError, ValueError):  # Some sandboxes have no such file.
        return 0

    def number_of(name: str) -> int:
        # Version 1 says `total_` where it counts the groups inside, too. Version 2 always does.
        return numbers.get(f"total_{name}", numbers.get(name, 0))

    dirty = sum(map(number_of, ("file_dirty", "file_writeback", "dirty", "writeback")))
    return number_of("inactive_file") + max(number_of("active_file") - dirty, 0)


def return_freed_memory() -> None:
    """Gives freed memory back to the system, where the C library has a call for that.

    glibc keeps it for later. After packing a 1B model this returned 280 MB.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


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

"""What stops an evaluation on purpose, and how a command ends then: one line, exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from selfspec.errors import SelfSpecError


class EvalError(SelfSpecError, ValueError):
    """A file, an option or a name that an evaluation can't work with."""


def exit_status(run: Callable[[], int]) -> int:
    """What a command ends with: 2, and one line, where it can't be run as asked."""
    try:
        return run()
    except (OSError, SelfSpecError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def one_line(error: Exception) -> str:
    """An error for a row or a line of output."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def last_line(said: str) -> str:
    """Why a process ended, by what it said: errors come last."""
    return (said.strip().splitlines() or ["it said nothing"])[-1]

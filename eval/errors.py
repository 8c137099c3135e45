"""What stops an evaluation on purpose: one line, exit status 2."""

from __future__ import annotations

from selfspec.errors import SelfSpecError

__all__ = ["EvalError"]


class EvalError(SelfSpecError, ValueError):
    """A file, an option or a name that an evaluation can't work with."""

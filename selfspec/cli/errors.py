"""What a user of the command line asked for and can't have."""

from __future__ import annotations

from selfspec.errors import SelfSpecError

__all__ = ["CliError", "one_line"]


class CliError(SelfSpecError, ValueError):
    """An option or a file that a command can't work with; one line, exit status 2."""


def one_line(message: object) -> str:
    """The first paragraph of a message that somebody else wrote, on one line.

    >>> one_line("no such\\nmodel\\n\\nIf this is a private repository, ...")
    'no such model'
    """
    paragraphs = str(message).strip().split("\n\n")
    return " ".join(paragraphs[0].split())

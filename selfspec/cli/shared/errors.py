"""The error that a command raises when its options or files are wrong."""

from __future__ import annotations

from selfspec.errors import SelfSpecError


class CliError(SelfSpecError, ValueError):
    """An option or a file is wrong. The command ends with one line and exit status 2."""


def one_line(message: object) -> str:
    """The first paragraph of another library's message, on one line.

    >>> one_line("no such\\nmodel\\n\\nIf this is a private repository, ...")
    'no such model'
    """
    paragraphs = str(message).strip().split("\n\n")
    return " ".join(paragraphs[0].split())

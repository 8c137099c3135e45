"""The command line: `selfspec demo`, `chat`, `generate`, `profile` and `cache`.

Nothing here imports torch before a command says what it does, so that it answers at once.
"""

from selfspec.cli.app import main

__all__ = ["main"]

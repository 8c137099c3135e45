"""The command line. Each command has a room, and `shared/` is what several of them need.

Nothing here imports torch before a command says what it does, so that it answers at once.
"""

from selfspec.cli.app import main

__all__ = ["main"]

"""The command line: `selfspec demo`, `chat` and `generate`.

Nothing here imports torch before a command runs, so that `--help` answers at once.
"""

from selfspec.cli.app import main

__all__ = ["main"]

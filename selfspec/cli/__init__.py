"""The command line: a command parses, calls one function of the package, and prints.

Nothing here imports torch before a command says what it does, so that it answers at once.
"""

from selfspec.cli.app import main

__all__ = ["main"]

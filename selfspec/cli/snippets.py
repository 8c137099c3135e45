"""The prompts of the demo, in the style of Python's standard library."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SNIPPETS", "Snippet", "named"]


class Snippet(NamedTuple):
    """A prompt and what to call it."""

    name: str
    prompt: str


SNIPPETS = (
    Snippet(
        "class",
        '''class Queue:
    """Create a queue object with a given maximum size.

    If maxsize is <= 0, the queue size is infinite.
    """

    def __init__(self, maxsize=0):
''',
    ),
    Snippet(
        "function",
        '''def copyfile(src, dst, *, follow_symlinks=True):
    """Copy data from src to dst in the most efficient way possible.

''',
    ),
    Snippet(
        "tests",
        """import unittest
from test import support


class TestSpecifics(unittest.TestCase):

    def test_basic(self):
        self.assertEqual(""",
    ),
    Snippet(
        "script",
        """def main():
    import argparse
    parser = argparse.ArgumentParser(description='A simple command-line interface')
    parser.add_argument(""",
    ),
)


def named(prompts: list[str]) -> tuple[Snippet, ...]:
    """The user's prompts, each named by the start of its first line, or else the demo's."""
    own = (Snippet(_short(prompt.strip()), prompt) for prompt in prompts)
    return tuple(own) if prompts else SNIPPETS


def _short(text: str, width: int = 20) -> str:
    line = text.split("\n")[0]
    return line if len(line) <= width else line[: width - 1] + "…"

"""Says what a command is doing while there is nothing else to see, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Shows `what` beside a spinner until it is done; without a terminal it prints a plain line.

    Yields a function that replaces the words beside the spinner. Without a terminal the first
    line stands for all of them.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)
        yield _ignored
        return
    with console.status(Text(f"{what} ...")) as status:
        yield lambda text: status.update(Text(f"{text} ..."))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner alone, for the moments before a text begins; without a terminal nothing."""
    console = Console(stderr=True)
    if not console.is_interactive:
        yield
        return
    with console.status(Text(f"{what} ...")):
        yield


def _ignored(_text: str) -> None:
    """Where there is no spinner, nothing changes."""

"""Another value in a place that all threads look into, for as long as any of them needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol


class Owner(Protocol):
    """Has values by their names, as `vars()` of a module has."""

    def __getitem__(self, name: str, /) -> Any: ...
    def __setitem__(self, name: str, value: Any, /) -> None: ...


@dataclass
class _Swap:
    owner: Owner  # Holding it keeps its id from being used again.
    before: Any
    ours: Any
    num_inside: int


_lock = threading.Lock()
_swaps: dict[tuple[int, str], _Swap] = {}


@contextmanager
def swapped(owner: Owner, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `owner[name]` is what `make` gives for the value that was there, in all threads.

    Whoever comes second finds the first one's swap and leaves it. The last one to leave puts the
    value back. What other code puts there meanwhile stays, and `make` gets it next time.
    """
    key = id(owner), name
    with _lock:
        present, swap = owner[name], _swaps.get(key)
        if swap is None or present is not swap.ours:
            number = 0 if swap is None else swap.num_inside
            swap = _swaps[key] = _Swap(owner, present, make(present), number)
            if swap.ours is not present:
                owner[name] = swap.ours
        swap.num_inside += 1
    try:
        yield
    finally:
        with _lock:
            swap = _swaps[key]
            swap.num_inside -= 1
            if not swap.num_inside:
                del _swaps[key]
                with suppress(KeyError):  # Other code may have taken it out.
                    if owner[name] is swap.ours is not swap.before:
                        owner[name] = swap.before

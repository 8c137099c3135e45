"""For each key token an LRU queue of the n-grams last seen behind it (Self-Draft's context cache).

Bounded in keys and in n-grams for each key. Knows tokens only, not whether a text, a prompt or a
branch said them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["GRAM_LENGTH", "GramQueues"]

# The paper's G: the tokens of an n-gram, its key among them.
GRAM_LENGTH = 4
_MAX_KEYS = 4096
# Each key keeps at most this many n-grams.
_MAX_GRAMS = 16

# An n-gram without its key.
Tail = tuple[int, ...]


class GramQueues:
    """The memory of one row.

    >>> queues = GramQueues()
    >>> queues.add([5, 6, 7, 8])
    >>> queues.add([5, 9, 7, 8])
    >>> queues.behind(5)
    [(9, 7, 8), (6, 7, 8)]
    """

    def __init__(self, *, max_keys: int = _MAX_KEYS, max_grams: int = _MAX_GRAMS) -> None:
        self._max_keys = max_keys
        self._max_grams = max_grams
        self._queues: OrderedDict[int, OrderedDict[Tail, None]] = OrderedDict()

    def add(self, gram: Sequence[int]) -> None:
        """Makes an n-gram of two tokens or more the freshest of its key; O(1).

        The stalest of the key makes room for it, and the key that was last added to longest ago
        for a new key.
        """
        key, *tail = gram
        queue = self._queues.setdefault(key, OrderedDict())
        self._queues.move_to_end(key)
        queue[tuple(tail)] = None
        queue.move_to_end(tuple(tail))
        if len(queue) > self._max_grams:
            queue.popitem(last=False)
        if len(self._queues) > self._max_keys:
            self._queues.popitem(last=False)

    def behind(self, key: int) -> list[Tail]:
        """The n-grams of a key without it, the freshest first."""
        queue = self._queues.get(key)
        return list(reversed(queue)) if queue else []

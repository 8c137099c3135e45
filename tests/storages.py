"""Which tensor storages come and go while something runs, on any device.

Knows torch's dispatcher; not what the tensors are for. Memory that a kernel takes for itself and
gives back before it returns is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Event(NamedTuple):
    """A storage has come (bytes > 0) or gone (< 0)."""

    number: int
    num_bytes: int


class StorageLog(TorchDispatchMode):
    """Numbers each storage that is made inside, from 1 on; what was there before is left out."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[_Event] = []
        self._numbers: dict[int, int] = {}  # of those alive, by address; 0: was there before
        self._num_made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):
            self._take(storage, is_new=False)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._take(storage, is_new=True)
        return result

    def number(self, tensor: torch.Tensor) -> int:
        """Of the storage that a tensor lies in; 0 where it was not made inside."""
        return self._numbers.get(tensor.untyped_storage()._cdata, 0)

    def peak(self, numbers: Container[int] | None = None) -> int:
        """The most bytes that were alive at a time: of these storages, or of all made inside."""
        steps = (e.num_bytes for e in self._events if numbers is None or e.number in numbers)
        return max(accumulate(steps), default=0)

    def _take(self, storage: Any, *, is_new: bool) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._numbers:
            return
        self._num_made += is_new
        number = self._num_made if is_new else 0
        self._numbers[address] = number
        if is_new:
            self._events.append(_Event(number, num_bytes))
        weakref.finalize(storage, self._drop, address, num_bytes).atexit = False

    def _drop(self, address: int, num_bytes: int) -> None:
        """An address may be another storage's next."""
        number = self._numbers.pop(address)
        if number:
            self._events.append(_Event(number, -num_bytes))


def _storages(held: Any) -> Iterable[Any]:
    return (leaf.untyped_storage() for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor))

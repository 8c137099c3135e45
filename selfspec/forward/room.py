"""How much room the keys and values of some rows get: three policies behind `room`.

A policy says how large one tensor of slots must be for these rows up to a column, and which column
comes first in it. If that is what it is already, nothing moves. With `spare` false it is the least
that will do, for when memory runs out. `outlives` says whether slots stay where they are when the
rows have gone, and `drops` whether columns may go that no window shows: not if shorter rows may
come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from selfspec.forward.slots import Room, Slots

ENDLESS = 1 << 62  # As a number of columns that nobody knows.
_MULTIPLE = 64  # Columns come in multiples of this where other rows or calls may use them, too.


@dataclass(eq=False)
class KVRow:
    """What a row knows of its keys and values, and where its next token is. A `Row` is one."""

    num_columns: int = 0  # that are committed
    max_columns: int = ENDLESS  # How many it may come to need.
    start: int = 0  # Its first column that counts.
    position: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((), np.int64))  # (...,)
    place: int = 0  # The row of slots that is its own.
    # Of each attention type, the first column that the prompt has left in stock's layers.
    first_columns: dict[str, int] = field(default_factory=dict)


class Limits(NamedTuple):
    """How many rows may be there together, and how many slots they may have; None: any number.

    All rows have as many columns as the longest, and `spare` more. One column of all of them takes
    `column_bytes`, with what is needed while a prompt is read, and their running states take
    `state_bytes`.
    """

    max_rows: int
    max_tokens: int | None = None
    spare: int = 0
    column_bytes: int = 0
    state_bytes: int = 0

    def bytes_for(self, longest: int) -> int:
        """What all rows take where the longest may come to need so many columns."""
        return _rounded(longest + self.spare) * self.column_bytes + self.state_bytes

    def fits(self, all_max_columns: Sequence[int]) -> bool:
        """Can rows be here together that may come to need this many columns each?"""
        num_tokens = len(all_max_columns) * (max(all_max_columns) + self.spare)
        is_small = self.max_tokens is None or num_tokens <= self.max_tokens
        return is_small and len(all_max_columns) <= self.max_rows


class Growing:
    """For the rows of one call, which come at once: twice what is needed, or all they may need."""

    outlives, drops = False, True

    def __init__(self, least: int = 256) -> None:
        self._least = least

    def room(self, slots: Slots, rows: Sequence[KVRow], end: int, *, spare: bool = True) -> Room:
        (num_rows, capacity, first), window = slots.room, slots.window
        if len(rows) <= num_rows and end - first <= capacity:
            return slots.room
        if window:
            first = max(first, min(row.num_columns for row in rows) - window + 1)
            if len(rows) <= num_rows and end - first + window // 2 <= capacity:
                return Room(num_rows, capacity, first)  # For half a window more.
        most, needed = max(row.max_columns for row in rows) - first, end - first
        more = (window or max(needed, self._least)) if spare else 0
        return Room(len(rows), max(min(needed + more, most), needed), first)


class Shared:
    """For rows that come and go: more rows at a time, and no more tokens than there may be."""

    outlives, drops = False, False

    def __init__(self, limits: Limits, least: int = 0) -> None:
        self._limits = limits
        self._least = least

    def room(self, slots: Slots, rows: Sequence[KVRow], end: int, *, spare: bool = True) -> Room:
        """As it is, or larger. With a limit, each row has at once all that it may need."""
        max_rows, max_tokens, extra, *_ = self._limits
        longest, (num_rows, capacity, _) = max(row.max_columns for row in rows), slots.room
        if max_tokens is not None:
            end = max(end, longest + extra)
        is_small = max_tokens is None or num_rows * capacity <= max_tokens
        if len(rows) <= num_rows and end <= capacity and is_small:
            return slots.room
        if max_tokens is not None:
            rounded = _rounded(end)
            columns = rounded if len(rows) * rounded <= max_tokens else end
            return Room(min(max_rows, max_tokens // columns), columns, 0)
        columns = max(min(end + max(end, self._least), longest), end) if spare else end
        if len(rows) > num_rows:
            num_rows = max(len(rows), min(2 * num_rows, max_rows))
        return Room(num_rows, max(_rounded(columns), capacity), 0)


class Fixed:
    """For captured forwards: slots that outlive the calls, with all rows that may come.

    Without limits they are for one call. Sizes suit the last use and this one, unless that takes
    over twice the memory.
    """

    outlives = True
    least: ClassVar[int] = 4096  # Adding slots voids what was captured.

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits
        self.drops = limits is None
        self._sizes = Growing(self.least) if limits is None else Shared(limits, self.least)

    def eager(self) -> Growing | Shared:
        """What goes on with these slots if no more forwards are captured."""
        return Growing() if self._limits is None else Shared(self._limits)

    def room(self, slots: Slots, rows: Sequence[KVRow], end: int, *, spare: bool = True) -> Room:
        """As it is, or larger, in multiples of 64 columns."""
        new, old = self._sizes.room(slots, rows, end, spare=spare), slots.room
        if new[:2] == old[:2]:
            return new
        max_rows, max_tokens, *_ = self._limits or Limits(new.rows)
        if max_tokens is not None:
            return new
        new = Room(max_rows, _rounded(new.columns), new.first)
        both = Room(max(new.rows, old.rows), max(new.columns, old.columns), new.first)
        sizes = [math.prod(room[:2]) for room in (both, new, old)]
        return both if sizes[0] <= 2 * max(sizes[1:]) else new


def _rounded(columns: int) -> int:
    return -(-columns // _MULTIPLE) * _MULTIPLE


Policy = Growing | Shared | Fixed

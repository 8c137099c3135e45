"""How many slots the keys and values of some rows get, which is decided here and nowhere else.

A `Policy` looks at the size that a tensor of slots has and at what the rows need, and returns the
size that it should have. If that is the same, nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ENDLESS = 1 << 62  # A number of columns that nobody knows.
_MULTIPLE = 64  # Columns come in multiples of this where other rows or calls may use them, too.
# When slots of one call run out, it gets this many more, or twice as many as there were.
_MORE = 256
_MORE_FIXED = 4096  # The same for captured forwards, since more slots void what was captured.
_LEAST_LENGTH = 256


class Size(NamedTuple):
    """The slots of a row, and which column of the text the first slot holds."""

    rows: int
    columns: int
    first: int = 0


class Need(NamedTuple):
    """What the present rows need: slots for all columns before `end`.

    The longest row may come to need `most`; where memory is short, that is `end`. No query sees
    further back than `window` columns (0: it sees all), and the shortest row has `shortest`.
    """

    rows: int
    end: int
    most: int = ENDLESS
    window: int = 0
    shortest: int = 0


class Limits(NamedTuple):
    """How many rows may be there together, and how many slots they may have; None: any number.

    All rows have as many columns as the longest, and `surplus` more, which wider captured forwards
    need. One column of all rows takes `column_bytes`, with what is needed while a prompt is read,
    and their running states take `state_bytes`.
    """

    max_rows: int
    max_tokens: int | None = None
    surplus: int = 0
    column_bytes: int = 0
    state_bytes: int = 0

    def bytes_for(self, longest: int) -> int:
        """What all rows take where the longest may come to need this many columns."""
        return _rounded(longest + self.surplus) * self.column_bytes + self.state_bytes

    def fits(self, all_max_columns: Sequence[int]) -> bool:
        """Can rows be here together that may come to need this many columns each?"""
        num_tokens = len(all_max_columns) * (max(all_max_columns) + self.surplus)
        is_small = self.max_tokens is None or num_tokens <= self.max_tokens
        return is_small and len(all_max_columns) <= self.max_rows


class Policy(NamedTuple):
    """How slots grow. Rows of one call come at once; `limits` are for rows that come and go.

    If it `is_fixed`, captured forwards run over the slots, which stay where they are when the rows
    have gone.
    """

    limits: Limits | None = None
    is_fixed: bool = False

    @property
    def drops(self) -> bool:
        """May columns go that no window shows? Not if shorter rows may come."""
        return self.limits is None

    def size(self, now: Size, need: Need) -> Size:
        """The size that slots of a size should have."""
        if self.limits is not None and self.limits.max_tokens is not None:
            return within(now, need, self.limits, self.limits.max_tokens)
        more = _MORE_FIXED if self.is_fixed else _MORE if self.limits is None else 0
        size = grown(now, need, self.limits, more)
        return lasting(now, size, self.limits) if self.is_fixed else size


def grown(now: Size, need: Need, limits: Limits | None, more: int) -> Size:
    """Twice what is needed, or all that may be; columns in front of a window go first.

    >>> grown(Size(0, 0), Need(rows=2, end=300), None, more=256)
    Size(rows=2, columns=600, first=0)
    >>> grown(Size(2, 600), Need(rows=2, end=600), None, more=256)
    Size(rows=2, columns=600, first=0)
    >>> grown(Size(2, 600), Need(rows=2, end=601, most=700), None, more=256)
    Size(rows=2, columns=700, first=0)
    >>> grown(Size(1, 60), Need(rows=1, end=61, window=30, shortest=60), None, more=256)
    Size(rows=1, columns=60, first=31)

    Where rows come and go, there are slots for more rows, in multiples of 64 columns.

    >>> grown(Size(1, 128), Need(rows=2, end=100), Limits(max_rows=8), more=0)
    Size(rows=2, columns=256, first=0)
    """
    rows, columns, first = now
    if need.rows <= rows and need.end - first <= columns:
        return now
    if need.window:
        first = max(first, need.shortest - need.window + 1)
        if need.rows <= rows and need.end - first + need.window // 2 <= columns:
            return Size(rows, columns, first)  # There are slots for half a window more.
    needed = need.end - first
    wanted = needed + (need.window or max(needed, more))
    wanted = max(min(wanted, need.most - first), needed)
    if limits is None:
        return Size(need.rows, wanted, first)
    if need.rows > rows:
        rows = max(need.rows, min(2 * rows, limits.max_rows))
    return Size(rows, max(_rounded(wanted), columns), first)


def within(now: Size, need: Need, limits: Limits, max_tokens: int) -> Size:
    """The most rows that `max_tokens` allows, where each at once gets all that it may need.

    >>> within(Size(2, 256), Need(2, 200, most=900), Limits(8), max_tokens=2000)
    Size(rows=2, columns=960, first=0)
    """
    end = max(need.end, need.most + limits.surplus)
    is_enough = need.rows <= now.rows and end <= now.columns
    if is_enough and now.rows * now.columns <= max_tokens:
        return now
    columns = _rounded(end)
    if need.rows * columns > max_tokens:
        columns = end
    return Size(min(limits.max_rows, max_tokens // columns), columns)


def lasting(now: Size, new: Size, limits: Limits | None) -> Size:
    """A size for all rows that may come, in multiples of 64 columns.

    It suits the last use and this one, unless that takes over twice the memory.

    >>> lasting(Size(1, 640), Size(2, 500), None)
    Size(rows=2, columns=640, first=0)
    >>> lasting(Size(1, 6400), Size(64, 64), None)
    Size(rows=64, columns=64, first=0)
    """
    if new[:2] == now[:2]:
        return new
    max_rows = new.rows if limits is None else limits.max_rows
    new = Size(max_rows, _rounded(new.columns), new.first)
    both = Size(max(new.rows, now.rows), max(new.columns, now.columns), new.first)
    largest = max(new.rows * new.columns, now.rows * now.columns)
    return both if both.rows * both.columns <= 2 * largest else new


def length_bucket(length: int) -> int:
    """How many keys a captured forward gets if it needs `length` of them.

    >>> [length_bucket(length) for length in (1, 256, 257, 3000)]
    [256, 256, 512, 4096]
    """
    return max(_LEAST_LENGTH, 1 << (length - 1).bit_length())


def _rounded(columns: int) -> int:
    return -(-columns // _MULTIPLE) * _MULTIPLE

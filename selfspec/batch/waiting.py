"""Prompts that wait, in the order in which their turn comes.

Knows how much room each of them takes; nothing of models or rows.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedKeyList

if TYPE_CHECKING:
    from selfspec.batch.ticket import Ticket


_MOST_SHOWN = 256  # The most prompts that a scheduler chooses among.

_Turn = tuple[bool, int, int]


class Waiting:
    """Tickets by turn. Adding one, and removing one from anywhere, costs O(log n).

    In order of arrival, those that are decoded alone come after all others.

    With `short_first` a short prompt may overtake a long one, but none waits for ever: the turn of
    a ticket is its length plus the length of all tickets that had started when it came. So one of
    1,000 tokens is overtaken by others that come while less than 1,000 tokens of work are started,
    and by none that comes later.
    """

    def __init__(self, *, short_first: bool = False) -> None:
        self._short_first = short_first
        self._turns: dict[int, _Turn] = {}  # By the ticket's index.
        self._tickets: Any = SortedKeyList(key=lambda ticket: self._turns[ticket.index])
        self._by_index: dict[int, Ticket] = {}
        self._num_arrived = 0
        self._work_started = 0  # In tokens.

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Lets one more ticket wait."""
        self._num_arrived += 1
        if self._short_first:
            turn = (False, self._work_started + ticket.need, self._num_arrived)
        else:
            turn = (ticket.is_alone, 0, self._num_arrived)
        self._turns[ticket.index] = turn
        self._by_index[ticket.index] = ticket
        self._tickets.add(ticket)

    def start(self, ticket: Ticket) -> None:
        """Takes out a ticket whose prompt is read now."""
        self._work_started += ticket.need
        self.leave(ticket.index)

    def leave(self, index: int) -> bool:
        """Takes out a ticket that nobody wants any more; False if it does not wait."""
        ticket = self._by_index.pop(index, None)
        if ticket is None:
            return False
        self._tickets.remove(ticket)
        del self._turns[index]
        return True

    def indices(self) -> list[int]:
        """The names of all tickets."""
        return list(self._by_index)

    @property
    def next_alone(self) -> Ticket | None:
        """The first ticket, if it has to be decoded alone."""
        first: Ticket | None = self._tickets[0] if self._tickets else None
        return first if first is not None and first.is_alone else None

    def sharing(self) -> list[Ticket]:
        """The first tickets that may share forwards, up to the first that has to be alone."""
        return list(takewhile(lambda each: not each.is_alone, islice(self._tickets, _MOST_SHOWN)))

"""`Fleet`: workers on Ray that do jobs, each in a process of its own.

They are actors and not operators of Ray Data, which serves texts worse. Ray Data gives a worker a
block of rows, and takes it back whole. So rows of a batch would stay empty until the slowest text
of a block has ended, and a worker that ends would take all answers of its block along. Here a
worker gets the next prompt as soon as an answer is complete, and the answer is written at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from selfspec.errors import FleetError, SelfSpecError
from selfspec.fleet.cluster import Share, imported
from selfspec.fleet.jobs import Jobs, Lost
from selfspec.fleet.worker import Reply, Work, Worker

_MOST_FAILED_STARTS = 3  # One after the other; then it is no accident.
_AHEAD = 4  # Results that come too early wait in memory, this many for each worker at most.
_LAST_WAIT = 10.0  # In seconds, for workers that keep what they learned.

_log = logging.getLogger("selfspec")

J = TypeVar("J")


class _Member(Generic[J]):
    """A worker of the fleet, and what it is doing."""

    def __init__(self, actor: Any, failed_starts: int = 0) -> None:
        self.actor = actor  # As Ray calls a process of its own.
        self.failed_starts = failed_starts  # of the workers before this one
        self.held: dict[int, J] = {}
        self.is_open = False
        self.call: Any = actor.open.remote()  # What it was asked to do; None: nothing.


class Fleet(Generic[J]):
    """`num_workers` workers, each with a share of what Ray has; they end with the context.

    Args:
        opened: Called in each worker's process: a context whose value does the jobs.
        jobs_each: How many jobs a worker has at the same time.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Work]],
        num_workers: int,
        share: Share,
        *,
        jobs_each: int = 1,
    ) -> None:
        self._ray = imported()
        self._arguments = (opened, os.getcwd(), _log.level)
        self._worker = self._ray.remote(**share._asdict())(Worker)
        self._jobs_each = jobs_each
        self._members: list[_Member[J]] = [self._new_member() for _ in range(num_workers)]

    def __enter__(self) -> Fleet[J]:
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends all workers. Those that are busy may end what they do, within a few seconds."""
        calls = [member.actor.close.remote() for member in self._members if member.is_open]
        ended = (
            self._ray.wait(calls, num_returns=len(calls), timeout=_LAST_WAIT)[0] if calls else []
        )
        for call in ended:
            try:
                _show(self._ray.get(call))
            except self._ray.exceptions.RayError as error:
                _log.warning("a worker did not end well: %s", getattr(error, "cause", error))
        for member in self._members:
            self._ray.kill(member.actor)

    def wait(self) -> None:
        """Waits until a worker is ready; raises what it could not load."""
        while not any(member.is_open for member in self._members):
            self._hear(Jobs(()))

    def results(
        self, jobs: Iterable[tuple[int, J]], ahead: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """The result of each numbered job, in any order; `Lost` if workers ended with it.

        `ahead` is how far the numbers of jobs under way may lie apart. What a worker raises is
        raised here.
        """
        queue = Jobs(jobs, ahead)
        while True:
            for member in self._members:
                self._feed(member, queue)
            if not queue.num_open and any(member.is_open for member in self._members):
                return  # One that is ready found nothing to do.
            yield from self._hear(queue)

    def in_order(self, jobs: Iterable[J]) -> Iterator[tuple[J, Any]]:
        """Each job with its result, in the order of the jobs."""
        given: dict[int, J] = {}
        early: dict[int, Any] = {}
        first = 0

        def numbered() -> Iterator[tuple[int, J]]:
            for number, job in enumerate(jobs):
                given[number] = job
                yield number, job

        for number, result in self.results(numbered(), _AHEAD * len(self._members)):
            if isinstance(result, Lost):
                raise FleetError(
                    f"workers must survive each part of the data ({result.num_workers} ended with "
                    f"part {number + 1}); give them more memory, or start fewer"
                )
            early[number] = result
            while first in early:
                yield given.pop(first), early.pop(first)
                first += 1

    def _new_member(self, failed_starts: int = 0) -> _Member[J]:
        return _Member(self._worker.remote(*self._arguments), failed_starts)

    def _feed(self, member: _Member[J], queue: Jobs[J]) -> None:
        """Gives a worker more to do, if it is waiting for that."""
        if not member.is_open or member.call is not None:
            return
        fresh = queue.take(member.held, self._jobs_each)
        member.held |= fresh
        if member.held:
            member.call = member.actor.work.remote(list(fresh.items()))

    def _hear(self, queue: Jobs[J]) -> list[tuple[int, Any]]:
        """Waits for one worker; returns the results it has, or the jobs it ended with for good."""
        calls = {member.call: member for member in self._members if member.call is not None}
        (call, *_), _ = self._ray.wait(list(calls))
        member = calls[call]
        member.call = None
        try:
            reply: Reply = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SelfSpecError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:  # The worker is gone, or its machine.
            return self._replace(member, queue, error)
        member.is_open = True
        _show(reply)
        for number, _ in reply.results:
            del member.held[number]
            queue.done(number)
        return reply.results

    def _replace(
        self, member: _Member[J], queue: Jobs[J], error: Exception
    ) -> list[tuple[int, Any]]:
        """Puts a new worker in the place of one that has ended; its jobs are handed out again."""
        _log.info("a worker ended: %s", " ".join(str(error).split()))
        self._ray.kill(member.actor)
        index = self._members.index(member)
        failed_starts = 0 if member.is_open else member.failed_starts + 1
        if failed_starts < _MOST_FAILED_STARTS:
            _log.warning("a worker was killed or ran out of memory; another one takes its place")
            self._members[index] = self._new_member(failed_starts)
        else:
            del self._members[index]
            self._do_without()
        return list(queue.put_back(member.held))

    def _do_without(self) -> None:
        """Goes on with one worker less, if there is one."""
        what = f"{_MOST_FAILED_STARTS} ended one after the other, maybe for lack of memory"
        if not self._members:
            raise FleetError(f"workers must get ready ({what}); start fewer with --num-workers")
        _log.warning("a worker does not get ready (%s); %d go on", what, len(self._members))


def _show(reply: Reply) -> None:
    """Logs here what was logged in a worker."""
    for record in reply.records:
        _log.handle(record)

"""Which job comes next, also after workers have ended with some."""

from __future__ import annotations

from selfspec.fleet.jobs import Jobs, Lost


def numbered(count: int) -> list[tuple[int, str]]:
    return [(number, f"job {number}") for number in range(count)]


def test_a_worker_gets_as_many_as_it_can_have() -> None:
    jobs = Jobs(numbered(4))
    held = jobs.take({}, 3)
    assert held == {0: "job 0", 1: "job 1", 2: "job 2"}
    assert jobs.take(held, 3) == {}
    assert jobs.take({}, 3) == {3: "job 3"}
    for number in range(4):
        jobs.done(number)
    assert jobs.num_open == 0
    assert jobs.take({}, 3) == {}


def test_what_a_worker_ended_with_is_handed_out_first() -> None:
    jobs = Jobs(numbered(9))
    assert jobs.put_back(jobs.take({}, 2)) == []
    assert list(jobs.take({}, 3)) == [0, 1, 2]


def test_a_job_that_ends_workers_is_found_and_given_up() -> None:
    """It came with an innocent one twice; alone, each of them shows what it does."""
    jobs = Jobs(numbered(3))
    for _ in range(2):
        assert jobs.put_back(list(jobs.take({}, 2))) == []
    busy = jobs.take({8: "other"}, 2)
    assert list(busy) == [2]
    alone = jobs.take({}, 2)
    assert list(alone) == [0]
    assert jobs.take(alone, 2) == {}
    assert jobs.put_back(alone) == [(0, Lost(3))]
    assert list(jobs.take({}, 2)) == [1]
    jobs.done(1)
    jobs.done(2)
    assert jobs.num_open == 0


def test_nobody_is_far_ahead() -> None:
    jobs = Jobs(numbered(9), ahead=3)
    assert list(jobs.take({}, 9)) == [0, 1, 2]
    jobs.done(1)
    assert jobs.take({}, 9) == {}
    jobs.done(0)
    assert list(jobs.take({}, 9)) == [3, 4]

"""Prompts are admitted as planned, within memory, each of them once; simulated rows come and go."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from selfspec.batch.latency import Coefficients, Latency, Stage
from selfspec.batch.planner import BatchStep, Planner
from selfspec.errors import ConfigError

ANSWER = 128
TRUE = Latency(
    Stage(Coefficients(0.02, 0.001, 0.004), horizon=4000), Stage(Coefficients(0, 2e-4, 2e-4))
)


class Prompt(NamedTuple):
    length: int
    answer: int


class InOrder:
    """As many as fit, in order of arrival."""

    def choose(self, waiting: list[int], running: list[int], room: int) -> list[int]:
        capacity = room + memory(running)
        for number in range(len(waiting) + 1):
            rows = [*running, *waiting[:number]]
            if number == len(waiting) or len(rows) == 16:
                return list(range(number))
            if memory([*rows, waiting[number]]) > capacity:
                return list(range(number))
        raise AssertionError


class LargestBatch:
    """As many as fit, the longest first."""

    def choose(self, waiting: list[int], running: list[int], room: int) -> list[int]:
        order = sorted(range(len(waiting)), key=lambda index: -waiting[index])
        found = InOrder().choose([waiting[index] for index in order], running, room)
        return [order[index] for index in found]


def memory(lengths: list[int]) -> int:
    """All rows take as much as the longest one."""
    return len(lengths) * max(lengths, default=0)


def new_planner(**more: Any) -> Planner:
    latency = Latency(Stage.unknown(0.2, horizon=4000), Stage.unknown(0.2))
    return Planner(latency, **{"max_rows": 16, "answer_tokens": ANSWER, **more})


def new_prompts(seed: int, number: int = 64) -> list[Prompt]:
    chance = random.Random(seed)
    return [
        Prompt(min(int(chance.lognormvariate(5, 1)), 1300), chance.choice([20, 60, 128]))
        for _ in range(number)
    ]


def simulated(prompts: list[Prompt], policy: Any, capacity: int = 8000) -> tuple[float, float]:
    """The seconds until the last answer, and the mean, with 4 queries a row and step."""
    waiting, running = list(prompts), dict[Prompt, float]()
    waiting = [Prompt(p.length + 1e-6 * n, p.answer) for n, p in enumerate(waiting)]
    clock, ends = 0.0, []
    while waiting or running:
        held = [int(prompt.length) + ANSWER for prompt in running]
        lengths = [int(prompt.length) + ANSWER for prompt in waiting]
        room = capacity - memory(held)
        chosen = policy.choose(lengths, held, room)
        assert len(set(chosen)) == len(chosen)
        assert memory([*held, *(lengths[index] for index in chosen)]) <= capacity
        running |= {waiting[index]: 0.0 for index in chosen}
        clock += sum(float(TRUE.reading_s(1, waiting[index].length)) for index in chosen)
        waiting = [prompt for index, prompt in enumerate(waiting) if index not in chosen]
        assert 0 < len(running) <= 16
        clock += stepped(running, policy)
        for prompt in [prompt for prompt, done in running.items() if done >= prompt.answer]:
            del running[prompt]
            ends.append(clock)
    assert len(ends) == len(prompts)
    return clock, sum(ends) / len(ends)


def stepped(running: dict[Prompt, float], policy: Any) -> float:
    context = max(int(prompt.length + done) for prompt, done in running.items())
    at = len(running), 3, context
    draft, verify = float(TRUE.draft_s(*at)), float(TRUE.verify_s(*at))
    if isinstance(policy, Planner):
        num_tokens = round(1.8 * len(running))
        policy.observe_step(BatchStep(len(running), 4, context, draft, verify, num_tokens))
    for prompt in running:
        running[prompt] += 1.8
    return draft + verify


def test_plans_beat_the_order_of_arrival_and_the_largest_batch():
    for seed in range(2):
        prompts = new_prompts(seed)
        others = [simulated(prompts, policy) for policy in (InOrder(), LargestBatch())]
        total, mean = simulated(prompts, new_planner())
        assert total < 1.005 * min(other[0] for other in others)
        assert mean < min(other[1] for other in others)
        assert simulated(prompts, new_planner(objective="mean"))[1] < mean


def test_what_waits_may_change_as_it_likes():
    """New prompts at the end, and quite other ones: every answer is an index that fits."""
    planner, chance = new_planner(max_rows=4), random.Random(0)
    waiting: list[int] = []
    for _ in range(60):
        if chance.random() < 0.2:
            chance.shuffle(waiting)
        waiting += [chance.randint(130, 900) for _ in range(chance.randint(0, 3))]
        running = [chance.randint(130, 900) for _ in range(chance.randint(0, 5))]
        room = chance.randint(0, 2000)
        chosen = planner.choose(waiting, running, room)
        assert len(chosen) == len(set(chosen)) <= max(4 - len(running), 0)
        if chosen:
            rows = [*running, *(waiting[index] for index in chosen)]
            assert memory(rows) <= room + memory(running)
        if not running and waiting and min(waiting) <= room:
            assert chosen
        waiting = [length for index, length in enumerate(waiting) if index not in chosen]


def test_a_prompt_beyond_all_memory_stops_no_other():
    planner = new_planner()
    assert planner.choose([130, 9000, 140], [], 1000) == [0, 2]
    assert planner.choose([9000], [130], 870) == []
    assert planner.choose([9000, 150], [130], 870) == [1]


def test_a_single_prompt_joins_what_runs():
    assert new_planner().choose([150], [140, 160], 10**9) == [0]


def test_answers_and_drafts_teach_how_long_a_prompt_takes():
    planner = new_planner()
    for _ in range(200):
        planner.observe_step(BatchStep(4, 5, 300, 0.001, 0.1, 4 * 5))
        planner.observe_answer(10)
    planner.choose([200] * 8, [], 10_000)
    assert planner.draft_length >= 8  # All drafts were accepted, and further ones cost little.


@pytest.mark.parametrize("wrong", [{"max_rows": 0}, {"answer_tokens": 0}, {"objective": "latency"}])
def test_what_can_not_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        new_planner(**wrong)

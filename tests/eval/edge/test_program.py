"""Plans are the best of all that there are, found by trying all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from eval.edge.latency import Coefficients, Latency, Stage
from eval.edge.program import Plan, in_batches, in_pipeline, in_turns
from eval.edge.work import Setting, Sorted, Task, tokens_per_step
from eval.errors import EvalError

SEEDS = range(12)


def new_case(seed: int) -> tuple[list[Task], Setting]:
    """A few sorted prompts on a machine where anything may be dear."""
    chance = random.Random(seed)
    tasks = [Task(chance.randint(10, 800), chance.randint(5, 40)) for _ in range(seed % 6 + 2)]
    verify, draft = (
        Stage(
            Coefficients(chance.uniform(0, 0.05), chance.uniform(0, 0.01), chance.uniform(0, 1e-3)),
            horizon=chance.choice([500, 4000]),
        )
        for _ in range(2)
    )
    return sorted(tasks), Setting(
        Latency(verify, draft),
        acceptance=chance.uniform(0.2, 0.9),
        max_rows=chance.randint(2, 8),
        max_tokens=chance.choice([4000, 1e9]),
        lengths=(0, 2, 5),
    )


def all_splits(tasks: list[Task], setting: Setting) -> Iterator[list[range]]:
    """Every split into batches of neighbours that fit."""
    inside = range(1, len(tasks))
    for cuts in itertools.product([False, True], repeat=len(tasks) - 1):
        ends = [end for end, is_cut in zip(inside, cuts, strict=True) if is_cut]
        split = [range(*pair) for pair in itertools.pairwise([0, *ends, len(tasks)])]
        if all(fits(tasks[batch.start : batch.stop], setting) for batch in split):
            yield split


def fits(batch: list[Task], setting: Setting) -> bool:
    longest = max(t.input_length for t in batch) + max(t.output_length for t in batch)
    return len(batch) <= setting.max_rows and len(batch) * longest <= setting.max_tokens


def batch_seconds(tasks: list[Task], batch: range, length: int, setting: Setting) -> float:
    """Step by step, with steps of any length, so that all rows end when their tokens are there."""
    latency, own = setting.latency, tasks[batch.start : batch.stop]
    most = max(task.output_length for task in own)
    inputs = [task.input_length for task in own]
    per_step = float(tokens_per_step(length, setting.acceptance))
    reading = latency.reading_s(len(own), max(inputs))
    seconds = float(reading + latency.draft_reading_s(len(own), max(inputs)))
    rows = sum(task.output_length for task in own) / most
    at = rows, length, max(inputs) + most / 2
    return seconds + most / per_step * float(latency.draft_s(*at) + latency.verify_s(*at))


def turns_seconds(tasks, split, setting) -> float:
    return sum(
        min(batch_seconds(tasks, batch, n, setting) for n in setting.lengths) for batch in split
    )


def pipeline_seconds(tasks, split, length, setting) -> float:
    """The clock of two devices, step after step."""
    work = Sorted(tasks, setting)
    num_steps = work.num_steps(length)
    stages = [work.stages(batch, length, num_steps) for batch in split]
    clock = 0.0
    for step in range(int(num_steps.max())):
        drafted = verified = clock
        for draft, verify in stages:
            drafted += draft[step]
            verified = max(drafted, verified) + verify[step]
        clock = verified
    return clock


def test_batches_in_turns_are_the_best_of_all():
    for seed in SEEDS:
        tasks, setting = new_case(seed)
        plan = in_turns(tasks, setting)
        values = [turns_seconds(tasks, s, setting) for s in all_splits(tasks, setting)]
        assert plan.seconds == pytest.approx(min(values))
        assert turns_seconds(tasks, plan.batches, setting) == pytest.approx(plan.seconds)


def test_batches_in_a_pipeline_are_the_best_of_all():
    for seed in SEEDS:
        tasks, setting = new_case(seed)
        plan = in_pipeline(tasks, setting, keep=1000)
        values = [
            pipeline_seconds(tasks, split, length, setting)
            for split in all_splits(tasks, setting)
            for length in setting.lengths
        ]
        assert plan.seconds == pytest.approx(min(values))
        length = plan.lengths[0]
        again = pipeline_seconds(tasks, plan.batches, length, setting)
        assert again == pytest.approx(plan.seconds)
        given = in_batches(tasks, setting, plan.batches)
        assert given.seconds == pytest.approx(plan.seconds)


def test_few_splits_are_nearly_as_good_as_all_and_the_papers_rule_is_not():
    worst = {1: 1.0, 16: 1.0}
    for seed in SEEDS:
        tasks, setting = new_case(12 * seed + 5)
        best = in_pipeline(tasks, setting, keep=1000).seconds
        for keep in worst:
            worst[keep] = max(worst[keep], in_pipeline(tasks, setting, keep=keep).seconds / best)
    assert worst[16] < 1.005
    assert 1.01 < worst[1] < 1.2


@pytest.mark.parametrize("program", [in_turns, in_pipeline])
def test_the_time_grows_with_prompts_times_the_largest_batch(monkeypatch, program):
    """Counted in batches that are looked at: twice the prompts have twice as many."""
    looked_at = 0
    starts = Sorted.starts

    def counted(self: Sorted, end: int) -> range:
        nonlocal looked_at
        looked_at += len(starts(self, end))
        return starts(self, end)

    monkeypatch.setattr(Sorted, "starts", counted)
    _, setting = new_case(0)
    setting = Setting(setting.latency, 0.5, max_rows=4, lengths=(1,))
    found = []
    for num_prompts in (20, 40):
        looked_at = 0
        program([Task(10 + n, 5) for n in range(num_prompts)], setting)
        found.append(looked_at / (num_prompts * 4 - 6))
    assert found[0] == found[1]


def test_a_dear_fixed_part_makes_large_batches_and_padding_makes_small_ones():
    lengths = [Task(n, 20) for n in (10, 11, 12, 900, 910, 920)]
    fixed = Setting(Latency(Stage(Coefficients(1.0, 0, 1e-4))), 0.5, max_rows=6)
    assert in_turns(lengths, fixed).batches == (range(6),)
    padded = Setting(Latency(Stage(Coefficients(0.02, 0, 1e-3), horizon=100)), 0.5, max_rows=6)
    assert in_turns(lengths, padded).batches == (range(3), range(3, 6))
    assert in_turns(lengths, padded).lengths[-1] == 0  # Where each query is dear, none drafts.
    assert min(in_turns(lengths, fixed).lengths) > 4


def test_no_prompts_and_prompts_that_fit_nowhere():
    _, setting = new_case(0)
    assert in_turns([], setting) == in_pipeline([], setting) == Plan((), (), 0.0)
    small = Setting(setting.latency, 0.5, max_rows=4, max_tokens=100)
    with pytest.raises(EvalError, match=r"max_tokens must be >= .* 130 \(got 100\)"):
        in_turns([Task(10, 5), Task(120, 10)], small)
    with pytest.raises(EvalError, match="acceptance"):
        Setting(setting.latency, 1.0, max_rows=4)

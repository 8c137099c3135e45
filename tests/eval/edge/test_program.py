"""The edge network: the paper's equations against slow ones, its schemes, and the command."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from eval import edge_network
from eval.edge.network import PAIRS, Network, Task, bandwidth_shares, new_users, upload_seconds
from eval.edge.program import best_batches, pipeline, stages, tokens_per_step, turns

DRAFT, _ = PAIRS["1.1B, 7B"]
SMALL = Network(input_tokens=(10, 400), output_tokens=(5, 40), memory_gb=3.0)
FEW = Network(num_users=6, output_tokens=(8, 24))
HERTZ = 20e6


def new_tasks(seed: int, number: int) -> list[Task]:
    chance = random.Random(seed)
    return [Task(chance.randint(10, 400), chance.randint(5, 40)) for _ in range(number)]


def clock(network: Network, batches: list[list[Task]], length: int, overlap: bool) -> float:
    """Two devices, step after step."""
    per_step = tokens_per_step(length, network.acceptance)
    steps = [math.ceil(max(t.output_length for t in own) / per_step) for own in batches]
    seconds = 0.0
    for step in range(max(steps)):
        drafted = verified = 0.0
        for own, last in zip(batches, steps, strict=True):
            if step < last:
                rows = np.array([float(len(own))])
                inputs = np.array([float(max(t.input_length for t in own))])
                draft, verify = stages(network, rows, inputs, length, step + 1)
                drafted = (drafted if overlap else verified) + draft[0, step]
                verified = max(drafted, verified) + verify[0, step]
        seconds += verified
    return seconds


@pytest.mark.parametrize("length", [1, 4])
def test_batches_that_are_done_leave_the_pipeline(length):
    tasks = new_tasks(length, 7)
    batches = [tasks[:3], tasks[3:4], tasks[4:]]
    assert pipeline(SMALL, batches, length) == pytest.approx(clock(SMALL, batches, length, True))
    assert turns(SMALL, batches, length) == pytest.approx(clock(SMALL, batches, length, False))


def test_algorithm_1_is_near_the_best_of_all_splits_and_keeps_to_memory():
    worst = 1.0
    for seed, case in itertools.product(range(6), (True, False)):
        network = replace(SMALL, reads_weights=case)
        tasks = sorted(new_tasks(seed, 7))
        plan = best_batches(network, tasks, 3)
        assert [task for batch in plan.batches for task in batch] == tasks
        long = [task._replace(output_length=40) for task in tasks]
        least = math.inf
        for cuts in itertools.product((False, True), repeat=len(tasks) - 1):
            ends = [n for n, is_cut in enumerate(cuts, start=1) if is_cut]
            split = [long[a:b] for a, b in itertools.pairwise([0, *ends, len(tasks)])]
            if all(network.fits(len(own), own[-1].input_length) for own in split):
                least = min(least, pipeline(network, split, 3))
        assert plan.expected >= least * (1 - 1e-9)
        worst = max(worst, plan.expected / least)
    assert worst < 1.05
    tight = replace(SMALL, memory_gb=1.85)
    batches = best_batches(tight, new_tasks(0, 7), 3).batches
    assert all(tight.fits(len(own), own[-1].input_length) for own in batches)


def test_shares_let_all_prompts_arrive_at_once_and_none_are_faster():
    users = new_users(Network(), seed=3)
    seconds, shares = bandwidth_shares(users, HERTZ)
    assert sum(shares) == pytest.approx(1)
    for user, share in zip(users, shares, strict=True):
        assert user.bits / (share * HERTZ * math.log2(1 + user.snr)) == pytest.approx(seconds)
    assert upload_seconds(users, [1 / len(users)] * len(users), HERTZ) > seconds


def test_the_command(figures, monkeypatch, tmp_path):
    few = tuple(
        each._replace(values=each.values[:1]) for each in edge_network.FIGURES if each.name == "6"
    )
    monkeypatch.setattr(edge_network, "FIGURES", few)
    monkeypatch.setattr(edge_network, "CLAIMS", ())
    monkeypatch.setattr(edge_network, "Network", lambda **more: replace(FEW, **more))
    page = tmp_path / "edge.html"
    found = figures("edge_network", "--draws", "1", "--out", str(page))
    assert set(found["figures"]["weights are read"]) == {"6"}
    assert page.read_text().count("</svg>") == 2

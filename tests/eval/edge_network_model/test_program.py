"""The edge network: the paper's equations against slow ones, and the command."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

from eval import edge_network
from eval.edge_network_model.equations import Task, best_batches, flops, seconds_of
from eval.edge_network_model.network import PAIRS, Network

DRAFT, _VERIFY = PAIRS["1.1B, 7B"]
SMALL = Network(input_tokens=(10, 400), output_tokens=(5, 40), memory_gb=3.0)
FEW = Network(num_users=6, output_tokens=(8, 24))


def new_tasks(seed: int, number: int) -> list[Task]:
    chance = random.Random(seed)
    return [Task(chance.randint(10, 400), chance.randint(5, 40)) for _ in range(number)]


def test_a_forward_is_counted_product_by_product():
    counted = 0
    d, f = DRAFT.hidden_size, DRAFT.ffn_size
    for _ in range(DRAFT.num_layers):
        counted += 4 * (2 * 3 * d * d) + 2 * (2 * 3 * d * f)  # Three tokens by all matrices.
        counted += 2 * (2 * 3 * 103 * d)  # Their scores and sums over 103 keys and values.
    assert float(flops(DRAFT, 3.0, 100.0)) == counted


def test_algorithm_1_is_near_the_best_of_all_splits_and_keeps_to_memory():
    worst = 1.0
    for seed in range(6):
        tasks = sorted(new_tasks(seed, 7))
        plan = best_batches(SMALL.stations, tasks, 3)
        assert [task for batch in plan.batches for task in batch] == tasks
        long = [task._replace(output_length=40) for task in tasks]
        least = math.inf
        for cuts in itertools.product((False, True), repeat=len(tasks) - 1):
            ends = [n for n, is_cut in enumerate(cuts, start=1) if is_cut]
            split = [long[a:b] for a, b in itertools.pairwise([0, *ends, len(tasks)])]
            if all(SMALL.stations.fits(len(own), own[-1].input_length) for own in split):
                least = min(least, seconds_of(SMALL.stations, split, 3))
        assert plan.expected >= least * (1 - 1e-9)
        worst = max(worst, plan.expected / least)
    assert worst < 1.05
    tight = replace(SMALL, memory_gb=1.85)
    assert not tight.stations.fits(2, 400)
    batches = best_batches(tight.stations, new_tasks(0, 7), 3).batches
    assert all(tight.stations.fits(len(own), own[-1].input_length) for own in batches)


def test_the_command(figures, monkeypatch, tmp_path):
    few = tuple(
        each._replace(values=each.values[:1]) for each in edge_network.FIGURES if each.name == "6"
    )
    monkeypatch.setattr(edge_network, "FIGURES", few)
    monkeypatch.setattr(edge_network, "CLAIMS", ())
    monkeypatch.setattr(edge_network, "Network", lambda **more: replace(FEW, **more))
    found = figures("edge_network", "--draws", "1", "--pictures", str(tmp_path))
    assert set(found["saved_percent"]) == {"weights are read", "weights cost nothing"}
    assert len(list(tmp_path.glob("edge-figure-6-*.svg"))) == 2

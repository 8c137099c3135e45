"""Answers are recorded with all that a replay learns from, and decoded again without the model."""

from __future__ import annotations

import json

import pytest
import torch

from eval import budgets
from eval.runs.clocked import Host
from eval.runs.recorded import read_texts
from selfspec import SpecConfig
from selfspec.cost import FixedBudget


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_replay_takes_the_steps_of_the_call(told, asked, tmp_path, temperature):
    """With the width that was recorded, trees, lessons and noise are those of the real call."""
    texts = tmp_path / "texts.jsonl"
    asked += ["--record", "--temperature", temperature, "--record-tokens", "12"]
    with torch.random.fork_rng():
        told("budgets", str(texts), *asked, "--record-nodes", "8", "--limit", "3")
    recorded = read_texts(texts)
    assert [len(text.output_ids) for text in recorded] == [12] * 3
    num_steps = sum((before, ()) in t.behind for t in recorded for before in range(12))
    assert num_steps <= 3 * 12
    case = budgets.CASES["flat, CUDA's prior"]
    machine = budgets.machine_of(case, noise=0.0, seed=0)
    answers = budgets.decoded(recorded, 12, SpecConfig(max_nodes=8), machine, FixedBudget)
    assert sum(answer.stats.num_new_tokens for answer in answers) == 36
    widths = [len(t.behind) for t in recorded]
    nodes = [answer.stats.num_nodes + 1 for answer in answers]  # The first token has a root alone.
    assert nodes == pytest.approx(widths, abs=4)  # Drafts of two steps may be the same text.
    plain = budgets.decoded(recorded, 12, SpecConfig(max_nodes=1), machine, FixedBudget)
    assert sum(a.seconds for a in plain) == pytest.approx(sum(a.plain_seconds for a in plain))
    assert plain[0].plain_seconds == pytest.approx(11 * (4.5e-3 + Host().step))
    status, (*table, line), _ = told("budgets", str(texts), "--answers", "2x8", "--repeats", "1")
    assert status == 0
    assert "1B, bfloat16, row by row" in "".join(table)
    assert set(json.loads(line)["answers"]["2 answers of 8 tokens"]) == set(budgets.CASES)

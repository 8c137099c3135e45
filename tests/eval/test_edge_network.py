"""The simulated edge network: shares of the band by the formula, schemes, and the command."""

from __future__ import annotations

import json
import math
import random

import pytest

from eval import edge_network
from eval.edge.network import Network, bandwidth_shares, new_users, upload_seconds
from eval.edge.schemes import DESCRIPTIONS, PLANNED, serve
from eval.edge_network import Sweep

HERTZ = 20e6
SMALL = Network(num_users=6, output_tokens=(8, 24))


def test_shares_let_all_prompts_arrive_at_once_and_none_are_faster():
    users = new_users(Network(), seed=3)
    seconds, shares = bandwidth_shares(users, HERTZ)
    assert sum(shares) == pytest.approx(1)
    for user, share in zip(users, shares, strict=True):
        rate = share * HERTZ * math.log2(1 + user.snr)
        assert user.bits / rate == pytest.approx(seconds)
    chance = random.Random(0)
    for _ in range(100):
        others = [share * chance.uniform(0.5, 2) for share in shares]
        others = [share / sum(others) for share in others]
        assert upload_seconds(users, others, HERTZ) >= seconds
    assert upload_seconds(users, [1 / len(users)] * len(users), HERTZ) > seconds


def test_a_seed_gives_the_same_users_and_another_one_others():
    assert new_users(Network(), 1) == new_users(Network(), 1) != new_users(Network(), 2)


def test_the_plan_is_the_best_scheme_and_each_baseline_is_what_it_says():
    served = serve(SMALL, new_users(SMALL, seed=0))
    assert list(served) == list(DESCRIPTIONS)
    assert all(served[PLANNED].seconds <= each.seconds for each in served.values())
    assert served["no speculation"].plan.lengths[0] == 0
    assert len(served["largest batch"].plan.batches) == 1
    assert [len(batch) for batch in served["heuristic"].plan.batches] == [3, 3]
    assert served["uniform bandwidth"].plan == served[PLANNED].plan
    assert served["uniform bandwidth"].upload > served[PLANNED].upload
    for each in served.values():
        assert sorted(index for batch in each.plan.batches for index in batch) == list(range(6))


def test_the_command(capsys, monkeypatch, tmp_path):
    sweeps = (Sweep("bandwidth_mhz", "bandwidth, MHz", (5, 20)),)
    monkeypatch.setattr(edge_network, "SWEEPS", sweeps)
    monkeypatch.setattr(edge_network, "Network", lambda: SMALL)
    page = tmp_path / "edge.html"
    assert edge_network.main(["--draws", "2", "--out", str(page)]) == 0
    first = capsys.readouterr().out
    assert edge_network.main(["--draws", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert first.splitlines()[-1] == last
    assert "19.6 and 20.5" in first
    told = json.loads(last)
    by_band = told["sweeps"]["bandwidth_mhz"]
    assert by_band["5"][PLANNED]["seconds"] > by_band["20"][PLANNED]["seconds"]
    assert told["assumed"]["num_users"] == 6
    assert "assumed" in page.read_text()
    assert page.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("options", "message"), [(["--draws", "0"], "--draws"), (["--out", "no/where.html"], "--out")]
)
def test_what_can_not_be_is_one_line_before_any_work(capsys, options, message):
    assert edge_network.main(options) == 2
    assert capsys.readouterr().err.startswith(f"error: {message} must be")

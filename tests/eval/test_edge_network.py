"""The simulated edge network: shares of the band by the formula, schemes, and the command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from eval import edge_network
from eval.edge.network import Network, new_users, shares_of_band, upload_seconds
from eval.edge.schemes import DESCRIPTIONS, PLANNED, serve

HERTZ = 20e6
SMALL = Network(num_users=6, output_tokens=(8, 24))


def test_shares_let_all_prompts_arrive_at_once_and_none_are_faster():
    users = new_users(Network(), seed=3)
    seconds, shares = shares_of_band(users, HERTZ)
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


def test_each_scheme_is_what_it_says():
    served = serve(SMALL, new_users(SMALL, seed=0))
    assert list(served) == list(DESCRIPTIONS)
    planned = served[PLANNED]
    assert served["uniform bandwidth"].inference == planned.inference
    assert served["uniform bandwidth"].upload > planned.upload
    for name in ("no pipeline", "no batching"):
        assert served[name].inference >= planned.inference, name
    alone = replace(SMALL, static_rows=1)
    again = serve(alone, new_users(alone, seed=0))
    assert again["static batches"] == again["no batching"]


def test_the_command(told, monkeypatch, tmp_path):
    few = {"8a": (6,), "8b": (1792,), "8c": (1024,), "7c": (1792,)}
    figures = tuple(
        each._replace(values=few.get(each.name, each.values[:1])) for each in edge_network.FIGURES
    )
    claims = tuple(
        claim._replace(at=6) if claim.figure == "8a" else claim for claim in edge_network.CLAIMS
    )
    monkeypatch.setattr(edge_network, "FIGURES", figures)
    monkeypatch.setattr(edge_network, "CLAIMS", claims)
    monkeypatch.setattr(edge_network, "Network", lambda **more: replace(SMALL, **more))
    page = tmp_path / "edge.html"
    options = ["--draws", "1", "--out", str(page), "--pictures", str(tmp_path / "drawn")]
    status, lines, _ = told("edge_network", *options)
    assert status == 0
    found = json.loads(lines[-1])
    assert any("| heuristic: prompts of up to 1,792 tokens | 8b | 19.6 |" in line for line in lines)
    assert "| path exponent | 3.0 |" in lines
    assert set(found["figures"]["weights are read"]) == {figure.name for figure in figures}
    assert page.read_text().count("</svg>") == 2 * len(figures)
    drawn = tmp_path / "drawn" / "edge-figure-6-weights-are-read.svg"
    assert drawn.read_text().startswith("<svg")

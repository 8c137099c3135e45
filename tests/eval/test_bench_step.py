"""The bench from end to end on a tiny random model: what it prints, and how it goes on."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from eval.benches.random_text import RandomPrompter, random_prompts
from eval.command import main as command
from eval.methods.method import Method
from eval.methods.registry import METHODS
from eval.report.statistics import STAGES
from tests.tiny import make_tokenizer


def test_random_prompts_are_the_same_however_many_there_are():
    tokenizer = make_tokenizer()
    few, many = (random_prompts(tokenizer, n, seed=3) for n in (2, 5))
    assert len(many) == 5
    assert all(torch.equal(a[1], b[1]) for a, b in zip(few, many, strict=False))
    ids = torch.cat([ids for _, ids in many])
    assert ids.shape == (5, 200)
    assert not set(ids.unique().tolist()) & set(tokenizer.all_special_ids)
    assert len(ids.unique()) > 250
    other = random_prompts(tokenizer, 1, seed=4)[0][1]
    assert not torch.equal(few[0][1], other)
    put = RandomPrompter(tokenizer, 3).prompt_ids(many[4][0], [])
    assert put == many[4][1][0].tolist()


@pytest.fixture
def bench(asked, told):
    """Runs on the questions with a chat model; returns status, lines and errors."""
    short = ["--threads", "1", "--max-new-tokens", "8", "--limit", "1"]
    return partial(told, "bench_step", *asked, *short)


def test_the_whole_bench(bench):
    methods = ["--methods", "stock", "prompt-lookup", "forward-only", "selfspec", "stock-static"]
    status, lines, _ = bench("--limit", "3", *methods, "--knob", "top_k=4")
    result = json.loads(lines[-1])
    assert status == 0
    ours, stock = (result["methods"][name]["overall"] for name in ("selfspec", "stock"))
    assert result["num_done"] == ours["num_same"] == 3
    assert result["settings"]["knobs"] == {"top_k": 4}
    assert set(ours["stage_ms"]) == set(STAGES)
    assert 0 < ours["overhead"] < 1
    assert list(result["methods"]["stock"]) == ["multi-turn", "qa", "overall"]
    assert ours["drafting_speed_up"]["total"] > 0
    assert stock["speed_up"] is None
    assert result["left_out"]["stock-static"].startswith("transformers does not compile")
    assert result["bound"]["64"]["speed_up"] >= 1
    assert result["curve"]["seconds"][0] > 0
    assert sum(" tokens: stock " in line for line in lines) == 3
    assert any("left out: transformers does not compile" in line for line in lines)


def test_a_killed_run_goes_on_and_can_be_compared(bench, tmp_path, capsys):
    out, whole = tmp_path / "rows.jsonl", tmp_path / "whole.jsonl"
    asked = ["--methods", "stock", "selfspec", "--budget", "fixed", "--limit"]
    bench(*asked, "2", "--out", str(out))
    before = out.read_text()
    out.write_text(before + '{"kind": "answer", "quest')  # killed in the middle of a line
    _, lines, _ = bench(*asked, "4", "--out", str(out))
    assert "2 of 4 are answered already" in lines
    assert out.read_text().startswith(before)
    resumed = json.loads(lines[-1])
    at_once = json.loads(bench(*asked, "4", "--out", str(whole))[1][-1])
    assert resumed["num_done"] == at_once["num_done"] == 4
    for name in ("num_same", "num_new_tokens", "tokens_per_step"):
        again, first = (each["methods"]["selfspec"]["overall"] for each in (resumed, at_once))
        assert again[name] == first[name], "what was learned must be learned again"
    assert command(["compare", str(out), str(whole)]) == 0
    assert "| selfspec | overall | 4 |" in capsys.readouterr().out


class Broken(Method):
    """Fails on every prompt but the warm-up's."""

    num_asked = 0

    def answer(self, model, ids, **asked):
        self.num_asked += 1
        if self.num_asked > 1:
            raise RuntimeError("no more")
        return super().answer(model, ids, **asked)


def test_a_failure_is_told_by_the_exit_status(bench, monkeypatch):
    monkeypatch.setitem(METHODS, "broken", lambda _: Broken("broken"))
    status, lines, _ = bench("--methods", "stock", "broken")
    assert status == 1
    assert any("broken FAILED (RuntimeError: no more)" in line for line in lines)
    figures = json.loads(lines[-1])["methods"]["broken"]["overall"]
    assert figures["num_failed"] == 1
    assert figures["speed_up"] is None

"""The bench from end to end on a tiny random model: what it prints, and how it goes on."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from eval import bench_step
from eval.benches.random_text import RandomPrompter, random_prompts
from eval.command import main as command
from eval.methods.method import Method
from eval.methods.registry import METHODS
from eval.report.statistics import STAGES
from selfspec import SelfSpec, SpecConfig
from selfspec.cost import CostCurve
from tests.fakes import new_model
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
    return partial(told, bench_step, *asked, *short)


def test_the_whole_bench(bench):
    methods = ["--methods", "stock", "prompt-lookup", "forward-only", "selfspec", "stock-static"]
    status, lines, _ = bench("--limit", "3", *methods, "--knob", "top_k=4")
    result = json.loads(lines[-1])
    assert status == 0
    assert result["num_prompts"] == result["num_same"] == 3
    assert result["knobs"] == {"top_k": 4}
    assert (result["max_nodes"], result["budget"]) == (SpecConfig.max_nodes, SpecConfig.budget)
    assert set(result["stage_ms"]) == set(STAGES)
    assert 0 < result["overhead"] < 1
    assert list(result["figures"]) == ["stock", "prompt-lookup", "forward-only", "selfspec"]
    assert list(result["figures"]["stock"]) == ["multi-turn", "qa", "overall"]
    ours = result["figures"]["selfspec"]["overall"]
    assert ours["speed_up"] == result["speed_up"]
    assert {"total", "median", "min", "max"} <= set(ours["speed_up"])
    assert ours["drafting_speed_up"]["total"] > 0
    assert result["figures"]["stock"]["overall"]["speed_up"] is None
    assert result["left_out"]["stock-static"].startswith("transformers does not compile")
    assert result["differs"] == {"prompt-lookup": [], "forward-only": [], "selfspec": []}
    assert result["bound"]["64"]["speed_up"] >= 1
    assert result["curve"]["ms"]["1"] > 0
    assert {"machine", "selfspec", "torch", "transformers", "ms_per_token"} <= set(result)
    assert sum(" tokens: stock " in line for line in lines) == 3
    assert any("left out: transformers does not compile" in line for line in lines)


@pytest.mark.slow
def test_random_text_is_drawn_hot(chat_folder, figures):
    options = ["--model", chat_folder, "--text", "random", "--limit", "2", "--max-new-tokens", "8"]
    result = figures(bench_step, *options, "--methods", "stock", "selfspec")
    assert result["temperature"] == 1.5
    assert result["num_prompts"] == result["num_same"] == 2
    assert list(result["figures"]["stock"]) == ["random", "overall"]


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
    for name in ("num_prompts", "num_same", "num_new_tokens", "tokens_per_step"):
        assert resumed[name] == at_once[name], "what was learned must be learned again"
    assert command(["compare", str(out), str(whole)]) == 0
    assert "| selfspec | overall | 4 |" in capsys.readouterr().out


def test_a_file_of_something_else_is_left_alone(bench, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n")
    status, _, error = bench("--out", str(path))
    assert status == 2
    assert "notes.txt line 1 must be a line of a run" in error
    assert path.read_text() == "buy milk\n"


def test_a_cache_and_an_assistant_are_taken(bench, chat_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    SelfSpec().save_pretrained(tmp_path / "known", tokenizer=tokenizer)
    asked = ["--methods", "stock", "assisted", "selfspec", "--assistant", chat_folder]
    status, lines, _ = bench(*asked, "--cache", str(tmp_path / "known"))
    result = json.loads(lines[-1])
    assert status == 0
    assert (result["cache"], result["assistant_model"]) == ("known", Path(chat_folder).name)
    assert result["figures"]["assisted"]["overall"]["num_same"] == 1


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
    figures = json.loads(lines[-1])["figures"]["broken"]["overall"]
    assert figures["num_failed"] == 1
    assert figures["speed_up"] is None


def test_a_kept_curve_stays_as_it_is(bench, measuring):
    """It says what calls go by: looking at it must not measure it anew."""
    asked = ["--methods", "stock", "selfspec"]
    bench(*asked)
    kept = Path(os.environ["XDG_CACHE_HOME"]) / "selfspec" / "measured.json"
    before = kept.read_text()
    _, lines, _ = bench(*asked, "--budget", "fixed")
    assert kept.read_text() == before
    (curves,) = (entry["values"] for entry in json.loads(before)["entries"].values())
    plain = CostCurve.from_dict(curves["0"]).seconds(1)
    assert json.loads(lines[-1])["curve"]["ms"]["1"] == round(1000 * plain, 4)


def test_a_chain_model_has_no_curve(bench, tmp_path, chat_folder):
    """Neither trees nor their cost: the reason stands where the bound would."""
    folder = str(tmp_path / "bloom")
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    tokenizer.save_pretrained(folder)
    new_model("bloom", vocab_size=len(tokenizer)).save_pretrained(folder)
    status, lines, _ = bench("--model", folder, "--methods", "stock")
    assert status == 0
    assert any("needs a model that can verify trees" in line for line in lines)
    assert json.loads(lines[-1])["curve"] is None

"""The streaming bench: processes that answer within a budget, and a table of what they did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import bench_streamed
from eval.methods.streamed_job import LOOKUP, METHODS, SMALL, Job, Result
from tests.streamed import least_memory, saved_model
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="samples memory as Linux tells it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    make_tokenizer().save_pretrained(folder)
    saved_model(folder, vocab_size=len(AutoTokenizer.from_pretrained(folder)))
    return folder


def job(folder: Path, method: str, **changes: object) -> Job:
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10]]
    knobs = {"budget": "fixed"}
    values = Job(str(folder), method, 0, 32, prompts, 12, "float32", 1, knobs, str(folder))
    return values._replace(**changes)


def bytes_of(amount: str) -> int:
    return int(amount.removesuffix("KB")) * 1000


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_process_answers_within_a_budget(folder, method):
    small = AutoModelForCausalLM.from_pretrained(folder) if method == SMALL else None
    budget = bytes_of(least_memory(folder, max_length=32, draft_model=small))
    result = bench_streamed._answered(job(folder, method, max_memory=budget))
    whole = bench_streamed._answered(job(folder, "streamed", max_memory=10**9))
    assert result.texts == whole.texts
    assert [len(text) for text in result.texts] == [12, 12]
    assert result.num_steps <= whole.num_steps == 22
    assert (result.num_nodes is None) == (method == LOOKUP)
    assert result.peak_bytes > 0
    assert whole.seconds_read == 0
    if method != "accelerate":
        assert result.bytes_read > 6 * 4096 * result.num_forwards  # Each forward reads all layers.
        assert result.seconds_read > 0


def test_the_command(folder, questions, told, monkeypatch):
    made = []

    def answered(each: Job) -> Result:
        made.append(each)
        seconds = 8.0 if each.method == "accelerate" else 2.0
        texts = [[1] * 9 for _ in each.prompts]
        num_nodes = 16 if each.method == "streamed" else None
        return Result(texts, seconds, 8, num_nodes, 10**9, 10, 2.0, 0.5, 7 * 10**6, 10**6)

    monkeypatch.setattr(bench_streamed, "_answered", answered)
    options = ["--model", str(folder), "--questions", str(questions), "--limit", "1"]
    options += ["--max-memory", "50%", "3MB", "--rounds", "2", "--dtype", "float32"]
    methods = ["accelerate", "streamed"]
    _, (*lines, last), _ = told("bench_streamed", *options, "--methods", *methods)
    assert [each.method for each in made[:4]] == [*methods, *methods[::-1]]
    assert made[5].max_memory == 3 * 10**6 > made[4].max_memory
    assert "## Within 3MB: 3 MB" in lines
    row = "| streamed | 4.00 | 4.00–4.00 | 4.00x | 1.00 | 2.0 | 100 | 75% | 7 | 1 | 1 of 1 |"
    assert lines.count(row) == 2
    assert sum("| 1.00 | – | 100 |" in line for line in lines) == 2
    figures = json.loads(last)["figures"]["3MB"]["methods"]["streamed"]
    assert figures["tokens_per_second"] == 4.0

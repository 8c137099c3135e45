"""What the CPU does beside a forward: recorded once, decoded again without the model."""

from __future__ import annotations

import json

import pytest

from eval import bench_step
from eval.runs.recorded import read_texts


def test_answers_are_recorded_once_and_timed_by_stage(told, asked, tmp_path, monkeypatch):
    out = tmp_path / "texts.jsonl"
    asked += ["--host-only", "--max-new-tokens", "10", "--limit", "2", "--out", str(out)]
    monkeypatch.setattr(bench_step, "_HOST_WIDTHS", (2, 4))
    status, lines, _ = told("bench_step", *asked)
    assert status == 0
    assert [len(text.output_ids) for text in read_texts(out)] == [10, 10]
    found = json.loads(lines[-1])["host"]
    assert [(width, *found[width]) for width in found] == [(n, "4", "8", "20") for n in "24"]
    for by_forward in found.values():
        for forward, each in by_forward.items():
            assert {"draft", "layout", "verify", "commit", "learn"} <= set(each["stage_ms"])
            assert each["num_steps"] > 0
            assert each["share"] == pytest.approx(each["beside_ms"] / int(forward), abs=1e-3)
    assert any(line.startswith("| not hidden |") for line in lines)
    assert told("bench_step", *asked, "--model", "none/such")[0] == 0, "it needs no model any more"

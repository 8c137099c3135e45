"""What the CPU does beside a forward: recorded once, decoded again without the model."""

from __future__ import annotations

import json

import pytest

from eval import bench_step
from eval.runs.recorded import read_texts


@pytest.fixture
def host_only(questions, capsys, monkeypatch):
    """Runs with trees of some widths; returns status, lines and errors."""

    def go(widths: tuple[int, ...], *more: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(bench_step, "_HOST_WIDTHS", widths)
        asked = ["--host-only", "--questions", str(questions), "--max-new-tokens", "10"]
        status = bench_step.main([*asked, "--limit", "2", *more])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return go


def test_answers_are_recorded_once_and_timed_by_stage(host_only, chat_folder, tmp_path):
    out = tmp_path / "texts.jsonl"
    status, lines, _ = host_only((2, 4), "--model", chat_folder, "--out", str(out))
    assert status == 0
    assert [len(text.output_ids) for text in read_texts(out)] == [10, 10]
    found = json.loads(lines[-1])["host"]
    assert {width: list(found[width]) for width in found} == {
        "2": ["4", "8", "20"],
        "4": ["4", "8", "20"],
    }
    for by_forward in found.values():
        for forward, each in by_forward.items():
            assert {"draft", "layout", "verify", "commit", "learn"} <= set(each["stage_ms"])
            assert each["num_steps"] > 0
            assert each["share"] == pytest.approx(each["beside_ms"] / int(forward), abs=1e-3)
    assert any(line.startswith("| not hidden |") for line in lines)
    # The second time no model is needed.
    assert host_only((2,), "--model", "none/such", "--out", str(out))[0] == 0


def test_texts_too_short_for_a_full_tree_are_one_line(host_only, chat_folder):
    status, _, error = host_only((4,), "--model", chat_folder, "--max-new-tokens", "1")
    assert status == 2
    assert "must see a tree of 4 nodes (got none)" in error

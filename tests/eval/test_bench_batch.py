"""Many prompts, answered in all ways: the same texts, and a table of what each way took."""

from __future__ import annotations

import json

from eval import bench_batch


def test_all_ways_write_the_same_texts(told, questions, chat_folder):
    asked = ["--model", chat_folder, "--questions", str(questions), "--threads", "1"]
    asked += ["--every", "1", "--rows", "2", "--max-new-tokens", "6"]
    status, lines, _ = told(
        bench_batch, *asked, "--limit", "4", "--budget", "fixed", "--max-nodes", "4"
    )
    figures = json.loads(lines[-1])["figures"]
    assert status == 0
    assert list(figures) == list(bench_batch.DEFAULTS)
    assert {each["num_same"] for each in figures.values()} == {4}
    assert figures["shortest"]["nodes_per_step"] > figures["rows alone"]["nodes_per_step"] == 1
    assert all(each["half_s"] <= each["all_s"] for each in figures.values())

"""Many prompts, answered in all ways: the same texts, and a table of what each way took."""

from __future__ import annotations

from eval import bench_batch


def test_all_ways_write_the_same_texts(figures, asked):
    asked += ["--threads", "1", "--every", "1", "--rows", "2", "--max-new-tokens", "6"]
    asked += ["--limit", "4", "--budget", "fixed", "--max-nodes", "4"]
    found = figures("bench_batch", *asked)["figures"]
    assert list(found) == list(bench_batch.DEFAULTS)
    assert {each["num_same"] for each in found.values()} == {4}
    assert found["shortest"]["nodes_per_step"] > found["rows alone"]["nodes_per_step"] == 1
    assert all(each["half_s"] <= each["all_s"] for each in found.values())

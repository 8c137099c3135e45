"""Many prompts, answered in all ways: the same texts, and a table of what each way took."""

from __future__ import annotations

import json
import re

import pytest

from eval import bench_batch


@pytest.fixture
def bench(questions, chat_folder, capsys):
    def go(*more: str) -> tuple[int, list[str], str]:
        asked = ["--model", chat_folder, "--questions", str(questions), "--threads", "1"]
        asked += ["--every", "1", "--rows", "2", "--max-new-tokens", "6"]
        status = bench_batch.main([*asked, *more])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return go


def test_all_ways_write_the_same_texts(bench):
    status, lines, _ = bench("--limit", "4", "--budget", "fixed", "--max-nodes", "4")
    figures = json.loads(lines[-1])["figures"]
    assert status == 0
    assert list(figures) == list(bench_batch.DEFAULTS)
    assert {each["num_same"] for each in figures.values()} == {4}
    assert figures["shortest"]["nodes_per_step"] > figures["rows alone"]["nodes_per_step"] == 1
    assert all(each["half_s"] <= each["all_s"] for each in figures.values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--methods", "stock", "fastest"], "--methods must be of .* fastest"),
        (["--methods", "arrival"], "'stock' among them"),
        (["--rows", "0"], r"--rows must be >= 1 \(got 0\)"),
    ],
)
def test_what_can_not_be_is_refused(bench, wrong, said):
    status, lines, error = bench(*wrong)
    assert status == 2
    assert not lines
    assert re.search(said, error)

"""Two servers side by side, and what is refused before they start."""

from __future__ import annotations

import json
import re

import pytest

from eval import bench_server
from eval.runs.served import serving

NEEDED = {"reason": "the server needs the extra: pip install 'selfspec[serve]'"}
for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, **NEEDED)


@pytest.fixture
def bench(questions, chat_folder, capsys):
    def go(*more: str) -> tuple[int, list[str], str]:
        asked = ["--model", chat_folder, "--questions", str(questions), "--threads", "1"]
        status = bench_server.main([*asked, "--every", "1", "--max-new-tokens", "6", *more])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return go


@pytest.mark.slow
def test_both_servers_give_the_same_answers(bench):
    status, lines, error = bench("--limit", "3", "--budget", "fixed", "--max-nodes", "4")
    assert status == 0, error
    told = json.loads(lines[-1])
    assert told["num_same"] == told["num_questions"] == 3
    assert list(told["figures"]) == ["transformers serve", "selfspec serve"]
    assert all(0 < each["first_s"] <= each["answer_s"] for each in told["figures"].values())


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(ValueError, match=r"'selfspec serve' did not start: .*nowhere"),
        serving("selfspec serve", "./nowhere", []),
    ):
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--max-new-tokens", "0"], r"--max-new-tokens must be >= 1 \(got 0\)"),
        (["--budget", "endless"], "budget"),
        (["--task", "cooking"], "cooking"),
    ],
)
def test_what_can_not_be_is_refused(bench, wrong, said):
    status, lines, error = bench(*wrong)
    assert status == 2
    assert not lines
    assert re.search(said, error)

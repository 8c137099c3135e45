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
    few = ("--limit", "4", "--clients", "1", "2", "--budget", "fixed", "--max-nodes", "4")
    status, lines, error = bench(*few)
    assert status == 0, error
    rounds = json.loads(lines[-1])["rounds"]
    asked = [(each["clients"], each["server"]) for each in rounds]
    assert asked == [(1, "transformers"), (1, "selfspec"), (2, "selfspec"), (2, "transformers")]
    assert all(each["num_same"] == 2 for each in rounds), json.dumps(rounds)
    assert all(0 < each["first_s"] <= each["answer_s"] for each in rounds), json.dumps(rounds)


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(ValueError, match=r"'selfspec' did not start: .*nowhere"),
        serving("selfspec", "./nowhere", []),
    ):
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--max-new-tokens", "0"], r"--max-new-tokens must be >= 1 \(got 0\)"),
        (["--clients", "0"], r"--clients must be >= 1 \(got 0\)"),
        (["--limit", "1", "--clients", "1", "2"], "--clients must name at most 1 rounds"),
        (["--budget", "endless"], "budget"),
        (["--task", "cooking"], "cooking"),
    ],
)
def test_what_can_not_be_is_refused(bench, wrong, said):
    status, lines, error = bench(*wrong)
    assert status == 2
    assert not lines
    assert re.search(said, error)

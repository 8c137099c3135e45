"""Two servers side by side."""

from __future__ import annotations

import json

import pytest

from eval import bench_server
from eval.runs.served import serving

NEEDED = {"reason": "the server needs the extra: pip install 'selfspec[serve]'"}
for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, **NEEDED)


@pytest.mark.slow
def test_both_servers_give_the_same_answers(told, questions, chat_folder):
    asked = ["--model", chat_folder, "--questions", str(questions), "--threads", "1"]
    asked += ["--every", "1", "--max-new-tokens", "6", "--limit", "4", "--clients", "1", "2"]
    status, lines, error = told(bench_server, *asked, "--budget", "fixed", "--max-nodes", "4")
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

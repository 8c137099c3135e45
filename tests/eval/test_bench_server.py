"""Two servers side by side."""

from __future__ import annotations

import pytest

NEEDED = {"reason": "the server needs the extra: pip install 'selfspec[serve]'"}
for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, **NEEDED)


def test_a_server_answers_in_rounds(figures, asked):
    asked += ["--threads", "1", "--limit", "1", "--max-new-tokens", "6", "--methods", "selfspec"]
    (found,) = figures("bench_server", *asked)["rounds"]
    assert (found["clients"], found["server"], found["num_same"]) == (1, "selfspec", None)
    assert 0 < found["first_s"] <= found["answer_s"]


@pytest.mark.slow
def test_both_servers_give_the_same_answers(figures, asked):
    asked += ["--every", "1", "--max-new-tokens", "6", "--limit", "4", "--clients", "1", "2"]
    asked += ["--threads", "1", "--budget", "fixed", "--max-nodes", "4"]
    rounds = figures("bench_server", *asked)["rounds"]
    order = [(each["clients"], each["server"]) for each in rounds]
    assert order == [(1, "transformers"), (1, "selfspec"), (2, "selfspec"), (2, "transformers")]
    assert all(each["num_same"] == 2 for each in rounds), rounds
    assert all(0 < each["first_s"] <= each["answer_s"] for each in rounds), rounds

"""The load run, for a moment: every text is right, and nothing is left behind."""

from __future__ import annotations

import json

import pytest

from eval import load_server

NEEDED = {"reason": "the server needs the extra: pip install 'selfspec[serve]'"}
for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, **NEEDED)


@pytest.mark.slow
def test_clients_that_come_and_go(capsys):
    options = ["--clients", "8", "--seconds", "4", "--threads", "1"]
    assert load_server.main(options) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["requests"]["right"] > 0
    assert set(told["requests"]) <= {"left", "right"}
    assert told["num_left_behind"] == 0

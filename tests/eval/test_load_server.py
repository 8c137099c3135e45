"""The load run, for a moment: every text is right, and nothing is left behind."""

from __future__ import annotations

import pytest

NEEDED = {"reason": "the server needs the extra: pip install 'selfspec[serve]'"}
for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, **NEEDED)


@pytest.mark.slow
def test_clients_that_come_and_go(figures):
    found = figures("load_server", "--clients", "8", "--seconds", "4", "--threads", "1")
    assert found["requests"]["right"] > 0
    assert set(found["requests"]) <= {"left", "right"}
    assert found["num_left_behind"] == 0

"""Who may ask: hosts, pages and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.conftest import COMPLETION, NAME, Served

KEY = "a secret"
PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def guarded(chat_folder: str) -> Iterator[Served]:
    gate = {"hosts": ["box.example.org"], "origins": [PAGE], "api_key": KEY}
    served = Served(chat_folder, gate=gate)
    served.thread.start()
    with served.client:
        yield served


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("Host", ("localhost", "127.0.0.1:8000", "[::1]:8000", "BOX.example.org:80"), 200),
        ("Host", ("evil.example.org", "localhost.evil.org", "127.0.0.1.evil.org", ""), 403),
        ("Host", ("[::1].evil.org", "[::1", "[::1]8", "[]", "localhost:evil.org", "::1"), 403),
        ("Host", (("localhost", "evil.example.org"),), 403),
        ("Origin", (PAGE,), 200),
        ("Origin", (OTHER, "null", f"{PAGE}.evil.org", "http://localhost:8000"), 403),
        ("Authorization", (f"Bearer {KEY}", f"bearer {KEY}"), 200),
        ("Authorization", ("Bearer another", f"Basic {KEY}", KEY, "", b"Bearer a s\xe9cret"), 401),
    ],
)
def test_who_may_ask(guarded: Served, name: str, values: tuple[Any, ...], status: int) -> None:
    for path in ("/v1/models", "/selfspec/stats", "/metrics"):
        for value in values:
            several = value if isinstance(value, tuple) else (value,)
            others = [each for each in BEARER.items() if each[0] != name]
            headers = [*others, *((name, each) for each in several)]
            response = guarded.client.get(path, headers=headers)
            assert response.status_code == status, value
            if status != 200:
                message = response.json()["error"]["message"]
                assert message.startswith(f"{name} must be")
                assert KEY not in message


def test_health_needs_no_key(guarded: Served) -> None:
    assert guarded.client.get("/health").json() == {"status": "ok"}
    assert guarded.client.get("/health", headers={"Host": "evil.org"}).status_code == 403


@pytest.mark.parametrize(("origin", "status"), [(PAGE, 200), (OTHER, 403)])
def test_a_page_may_ask_whether_it_may_ask(guarded: Served, origin: str, status: int) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    response = guarded.client.options(COMPLETION, headers=headers)
    assert response.status_code == status
    assert response.headers.get("Access-Control-Allow-Origin") == (PAGE if status == 200 else None)


def test_requests_without_the_key_do_nothing(guarded: Served) -> None:
    body = {"model": NAME, "prompt": "def", "max_tokens": 5}
    assert guarded.post(COMPLETION, body).status_code == 401
    assert guarded.spec.total_stats.num_calls == 0

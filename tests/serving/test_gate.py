"""Who may ask: hosts, pages and keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tests.serving.conftest import NAME, Served

KEY = "a secret"
PAGE = "https://chat.example.org"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def guarded(chat_folder: str) -> Iterator[Served]:
    gate = {"hosts": ["box.example.org"], "origins": [PAGE], "api_key": KEY}
    served = Served(chat_folder, gate=gate)
    served.thread.start()
    with served.client:
        yield served


@pytest.fixture
def client(guarded: Served) -> TestClient:
    return guarded.client


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "BOX.example.org:80"}, 200),
        ({"Host": "evil.example.org"}, 403),
        ({"Host": "localhost.evil.example.org"}, 403),
        ({"Host": "127.0.0.1.evil.example.org"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": PAGE}, 200),
        ({"Origin": "https://evil.example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"{PAGE}.evil.org"}, 403),
        ({"Origin": "http://localhost:8000"}, 403),
        ({"Authorization": "Bearer another"}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": ""}, 401),
        ({"Authorization": b"Bearer a s\xe9cret"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/selfspec/stats", "/metrics"])
def test_who_may_ask(client: TestClient, headers: dict[str, str], status: int, path: str) -> None:
    response = client.get(path, headers={**BEARER, **headers})
    assert response.status_code == status
    if status != 200:
        message = response.json()["error"]["message"]
        assert message.startswith(("Host must be", "Origin must be", "Authorization must be"))
        assert KEY not in message
    elif "Origin" in headers:
        assert response.headers["Access-Control-Allow-Origin"] == PAGE


def test_two_hosts_are_none(client: TestClient) -> None:
    headers = [("Host", "localhost"), ("Host", "evil.example.org"), *BEARER.items()]
    assert client.get("/v1/models", headers=headers).status_code == 403


def test_health_needs_no_key(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/health", headers={"Host": "evil.example.org"}).status_code == 403


@pytest.mark.parametrize(("origin", "status"), [(PAGE, 200), ("https://evil.example.org", 403)])
def test_a_page_may_ask_whether_it_may_ask(client: TestClient, origin: str, status: int) -> None:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    response = client.options("/v1/completions", headers=headers)
    assert response.status_code == status
    assert response.headers.get("Access-Control-Allow-Origin") == (PAGE if status == 200 else None)


def test_requests_without_the_key_do_nothing(guarded: Served) -> None:
    asked = {"model": NAME, "prompt": "def", "max_tokens": 5}
    assert guarded.client.post("/v1/completions", json=asked).status_code == 401
    assert guarded.spec.total_stats.num_calls == 0

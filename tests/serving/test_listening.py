"""The server as clients meet it: over HTTP, with a gate, clients that go away, and an end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import pytest
import uvicorn

from tests.serving.conftest import NAME, Served
from tests.waiting import PATIENCE, free_port, wait_until

ENDLESS = 20_000  # Tokens.
KEY = "a secret"
PAGE = "https://chat.example.org"


class Reply(NamedTuple):
    """An answer that was read to its end."""

    status: int
    headers: Any
    body: bytes

    @classmethod
    def on(cls, connection: http.client.HTTPConnection) -> Reply:
        with closing(connection), connection.getresponse() as response:
            return cls(response.status, response.headers, response.read())

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


class Address:
    """Where a server listens."""

    def __init__(self, served: Served, server: uvicorn.Server, port: int) -> None:
        self.served = served
        self.server = server
        self.port = port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def get(self, path: str, **headers: str) -> Reply:
        """The answer to a GET with these headers, which may name the host too."""
        connection = self.connect()
        connection.putrequest("GET", path, skip_host=True)
        for name, value in {"Host": "localhost", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        return Reply.on(connection)

    def post(self, body: dict[str, Any], **headers: str) -> http.client.HTTPConnection:
        """A connection on which a completion was asked for."""
        connection = self.connect()
        headers = {"Content-Type": "application/json", **headers}
        data = json.dumps({"model": NAME, "prompt": "def", **body})
        connection.request("POST", "/v1/completions", data, headers)
        return connection


@contextmanager
def listening(
    folder: str, *, gate: dict[str, Any] | None = None, **options: Any
) -> Iterator[Address]:
    """Inside, a server answers on a thread, as its command does in a process."""
    options = {"max_memory": None, "max_positions": None, **options}
    served = Served(folder, gate=gate, **options)
    served.thread.start()
    port = free_port()
    config = uvicorn.Config(served.app, host="127.0.0.1", port=port, server_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Address(served, server, port)
    finally:
        served.thread.break_off()
        server.should_exit = True
        thread.join(PATIENCE)


@pytest.fixture(scope="module")
def address(chat_folder: str) -> Iterator[Address]:
    gate = {"hosts": ["box.example.org"], "origins": [PAGE], "api_key": KEY}
    with listening(chat_folder, gate=gate, max_rows=2, max_waiting=2) as address:
        yield address


BEARER = {"Authorization": f"Bearer {KEY}"}
ENDLESSLY = {"max_tokens": ENDLESS, "logit_bias": {"1": -100}, "temperature": 0}


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
        ({"Authorization": "Bearer a s\xe9cret"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/selfspec/stats", "/metrics"])
def test_who_may_ask(address: Address, headers: dict[str, str], status: int, path: str) -> None:
    response = address.get(path, **{**BEARER, **headers})
    assert response.status == status
    if status != 200:
        message = response.message
        assert message.startswith(("Host must be", "Origin must be", "Authorization must be"))
        assert KEY not in message
    elif "Origin" in headers:
        assert response.headers["Access-Control-Allow-Origin"] == PAGE


def test_health_needs_no_key_and_says_nothing_more(address: Address) -> None:
    response = address.get("/health")
    assert response.status == 200
    assert json.loads(response.body) == {"status": "ok"}
    assert address.get("/health", Host="evil.example.org").status == 403
    assert "server" not in response.headers


def test_a_page_may_ask_whether_it_may_ask(address: Address) -> None:
    def preflight(origin: str) -> Reply:
        connection = address.connect()
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        connection.request("OPTIONS", "/v1/completions", headers=headers)
        return Reply.on(connection)

    assert preflight(PAGE).headers["Access-Control-Allow-Origin"] == PAGE
    assert preflight("https://evil.example.org").status == 403


def test_requests_without_the_key_do_nothing(address: Address) -> None:
    connection = address.post({"max_tokens": 5})
    assert Reply.on(connection).status == 401
    assert address.served.thread.session.num_running == 0


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_ends_its_row(address: Address, streams: bool) -> None:
    thread = address.served.thread
    connection = address.post({**ENDLESSLY, "stream": streams}, **BEARER)
    with closing(connection):
        if streams:
            with connection.getresponse() as response:
                assert response.readline().startswith(b"data: ")
                wait_until(lambda: thread.session.num_running == 1)
        wait_until(lambda: thread.session.num_running == 1)
    wait_until(lambda: thread.session.num_running == 0)
    assert thread.num_waiting == 0
    connection = address.post({"max_tokens": 4}, **BEARER)
    assert Reply.on(connection).status == 200


def test_too_many_are_told_to_come_again(address: Address) -> None:
    held = [address.post(dict(ENDLESSLY), **BEARER) for _ in range(4)]
    wait_until(lambda: address.served.thread.session.num_running == 2)
    wait_until(lambda: address.served.thread.num_waiting == 2)
    response = Reply.on(address.post({"max_tokens": 1}, **BEARER))
    assert response.status == 503
    assert response.headers["Retry-After"] == "1"
    assert "at most 4 texts" in response.message
    for connection in reversed(held):  # Those that wait leave first.
        connection.close()
    wait_until(lambda: address.served.thread.session.num_running == 0)
    assert address.served.thread.num_waiting == 0


def test_the_end_tells_those_who_wait(chat_folder: str) -> None:
    """What runs gets a few seconds after a SIGTERM; after Ctrl-C, as here, it is broken off."""
    with (
        listening(chat_folder, max_rows=1) as address,
        closing(address.post({**ENDLESSLY, "stream": True})) as running,
        running.getresponse() as streaming,
    ):
        assert streaming.readline().startswith(b"data: ")
        waiting = address.post(dict(ENDLESSLY))
        wait_until(lambda: address.served.thread.num_waiting == 1)
        address.served.thread.break_off()
        response = Reply.on(waiting)
        assert response.status == 503
        assert "being stopped" in response.message
        *_, last = [line for line in streaming.read().split(b"\n") if line]
    assert "being stopped" in json.loads(last.removeprefix(b"data: "))["error"]["message"]


def test_what_runs_may_end_after_a_sigterm(chat_folder: str) -> None:
    with listening(chat_folder) as address:
        body = {"max_tokens": 200, "stream": True, "temperature": 0, "logit_bias": {"1": -100}}
        with closing(address.post(body)) as running, running.getresponse() as streaming:
            assert streaming.readline().startswith(b"data: ")
            address.server.should_exit = True
            wait_until(lambda: not is_open(address.port))
            with pytest.raises(OSError, match="refused"):
                address.post({"max_tokens": 1})
            assert streaming.read().endswith(b"data: [DONE]\n\n")


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False

"""The server over HTTP: clients that go away, too many of them, and the end."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from selfspec.serving import app
from tests.fakes import new_model
from tests.serving.conftest import COMPLETION, NAME, Served
from tests.tiny import make_tokenizer
from tests.waiting import PATIENCE, free_port, wait_until

ENDLESS = {"max_tokens": 20_000, "logit_bias": {"1": -100}, "temperature": 0}


class Address(Served):
    """A server on a thread, as its command runs it in a process."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **{"max_memory": None, "max_positions": None, **options})
        self.port = free_port()
        config = uvicorn.Config(self.app, host="127.0.0.1", port=self.port)
        self.server = app._Server(config, self.thread)

    def complete(self, **body: Any) -> Any:
        """A connection on which a completion was asked for."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = json.dumps({"model": NAME, "prompt": "def", **body})
        connection.request("POST", COMPLETION, data, {"Content-Type": "application/json"})
        return closing(connection)

    def wait_for(self, *, num_running: int, num_waiting: int = 0) -> None:
        wait_until(lambda: self.thread.session.num_running == num_running)
        wait_until(lambda: self.thread.num_waiting == num_waiting)


@contextmanager
def listening(folder: str, **options: Any) -> Iterator[Address]:
    address = Address(folder, **options)
    address.thread.start()
    serving = threading.Thread(target=lambda: asyncio.run(address.server.serve()))
    serving.start()
    try:
        wait_until(lambda: address.server.started)
        yield address
    finally:
        address.thread.break_off()
        address.server.should_exit = True
        serving.join(PATIENCE)


@pytest.fixture(scope="module")
def address(chat_folder: str) -> Iterator[Address]:
    with listening(chat_folder, max_rows=2, max_waiting=2) as address:
        yield address


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_ends_its_row(address: Address, streams: bool) -> None:
    with address.complete(**ENDLESS, stream=streams) as connection:
        if streams:
            with connection.getresponse() as response:
                assert response.readline().startswith(b"data: ")
                address.wait_for(num_running=1)
        address.wait_for(num_running=1)
    address.wait_for(num_running=0)
    with address.complete(max_tokens=4) as connection:
        assert connection.getresponse().status == 200


def test_too_many_are_told_to_come_again(address: Address) -> None:
    held = [address.complete(**ENDLESS) for _ in range(4)]
    address.wait_for(num_running=2, num_waiting=2)
    with address.complete(max_tokens=1) as connection:
        response = connection.getresponse()
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert b"at most 4 texts" in response.read()
    for connection in reversed(held):  # Those that wait leave first.
        with connection:
            pass
    address.wait_for(num_running=0)


def test_at_the_end_everybody_is_told(chat_folder: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(app, "_PATIENCE", 0.2)
    with (
        listening(chat_folder, max_rows=1) as address,
        address.complete(**ENDLESS, stream=True) as running,
        running.getresponse() as streaming,
    ):
        assert streaming.readline().startswith(b"data: ")
        with address.complete(**ENDLESS) as waiting:
            address.wait_for(num_running=1, num_waiting=1)
            address.server.should_exit = True
            response = waiting.getresponse()
            assert response.status == 503
            assert b"being stopped" in response.read()
        *_, last = [line for line in streaming.read().split(b"\n") if line]
        assert b"being stopped" in last


def test_a_second_signal_breaks_off_what_runs_and_no_more(chat_folder: str) -> None:
    """uvicorn cancels everything, and prints a traceback for each connection."""
    with (
        listening(chat_folder) as address,
        address.complete(**ENDLESS, stream=True) as running,
        running.getresponse() as streaming,
    ):
        assert streaming.readline().startswith(b"data: ")
        for _ in range(2):
            address.server.handle_exit(signal.SIGINT, None)
        assert b"being stopped" in streaming.read().split(b"\n\n")[-2]
        assert not address.server.force_exit
        address.server._captured_signals.clear()  # uvicorn raises them at its end.


def test_what_runs_may_end(chat_folder: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(app, "_PATIENCE", PATIENCE)  # However slow this machine is.
    with listening(chat_folder) as address:
        body = {**ENDLESS, "max_tokens": 200, "stream": True}
        with address.complete(**body) as running, running.getresponse() as streaming:
            assert streaming.readline().startswith(b"data: ")
            address.server.should_exit = True
            assert streaming.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(OSError, match="refused"):
            address.complete(max_tokens=1)


def test_texts_that_are_written_alone_are_left_and_broken_off_too(tmp_path: Path) -> None:
    """As of a model whose rows can't share a forward."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    new_model("bloom", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    with listening(str(tmp_path)) as address:
        with address.complete(**ENDLESS):
            address.wait_for(num_running=1)
        address.wait_for(num_running=0)
        with (
            address.complete(**ENDLESS, stream=True) as running,
            running.getresponse() as streaming,
        ):
            assert streaming.readline().startswith(b"data: ")
            address.thread.break_off()
            assert b"being stopped" in streaming.read()
        with address.complete(max_tokens=1) as refused:
            assert refused.getresponse().status == 503
        assert address.thread.session.alone_reasons


def test_where_nothing_can_be_answered_any_more_everybody_is_told(
    chat_folder: str, monkeypatch: Any, caplog: Any
) -> None:
    """As where the session itself is broken, and not a prompt."""

    def fail(*_given: Any) -> None:
        raise RuntimeError("the device is lost")

    with listening(chat_folder) as address:
        monkeypatch.setattr(address.thread.session, "step", fail)
        with address.complete(max_tokens=3) as connection:
            assert connection.getresponse().status == 503
        assert address.thread.is_stopping
    assert "no request is answered any more" in caplog.text

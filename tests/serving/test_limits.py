"""One request holds up no other: what bodies may take, and clients that leave before their turn."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from selfspec.serving import limits
from selfspec.serving.fields import RequestError
from selfspec.serving.limits import ByteBudget
from selfspec.serving.settings import Settings
from selfspec.serving.translator import PromptTranslator
from tests.serving.conftest import COMPLETION
from tests.serving.test_listening import Address, listening
from tests.waiting import PATIENCE, wait_until

SIZE = 900_000  # of a body that is announced


@pytest.fixture(scope="module")
def address(chat_folder: str) -> Iterator[Address]:
    with listening(chat_folder, max_rows=2) as address:
        yield address


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[object, int]:
    """What each request has of the budget."""
    held, hold = dict[object, int](), ByteBudget.hold

    def noted(self: ByteBudget, request: object, num_bytes: int) -> None:
        hold(self, request, num_bytes)
        held[request] = num_bytes

    monkeypatch.setattr(ByteBudget, "hold", noted)
    return held


def stalled(address: Address, num_bytes: int) -> socket.socket:
    """A connection on which a part of a body was sent."""
    connection = socket.create_connection(("127.0.0.1", address.port), timeout=PATIENCE)
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SIZE}\r\n\r\n"
    connection.sendall(head.encode() + b" " * num_bytes)
    return connection


def answered(address: Address) -> int:
    with address.complete(max_tokens=1) as connection:
        return int(connection.getresponse().status)


def test_bodies_that_do_not_come_take_a_budget_and_no_more(
    address: Address, held: dict[object, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MOST_BYTES", 300_000)
    with stalled(address, 250_000):
        wait_until(lambda: sum(held.values()) > 180_000)
        with stalled(address, 250_000) as second:
            assert second.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        assert answered(address) == 200
    wait_until(lambda: not any(held.values()))


def test_a_body_has_its_time(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_BODY_SECONDS", 0.05)
    with stalled(address, 10) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_who_has_left_is_dropped_before_work_begins(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty long texts of clients that had gone once let the next one wait for 13 seconds."""
    prepared, go_on, arguments_for = list[str](), threading.Event(), PromptTranslator.arguments_for

    def slow(self: PromptTranslator, prompt: Any, settings: Any) -> Any:
        prepared.append(prompt)
        go_on.wait(PATIENCE)
        return arguments_for(self, prompt, settings)

    def num_gone() -> int:
        lines = address.client.get("/metrics").text.splitlines()
        return next(int(line.split()[1]) for line in lines if "requests_cancelled" in line)

    monkeypatch.setattr(PromptTranslator, "arguments_for", slow)
    before, posts = num_gone(), [address.complete(prompt=f"long {n}") for n in range(5)]
    wait_until(lambda: len(prepared) == 1 and address.thread.num_waiting == 5)
    for connection in posts:
        with connection:
            pass
    wait_until(lambda: num_gone() == before + 5)
    assert address.thread.num_waiting == 0
    go_on.set()
    assert answered(address) == 200
    assert prepared[1:] == ["def"]


def test_a_text_that_is_obviously_too_long_is_not_tokenized(chat_folder: str) -> None:
    class Never:
        def __call__(self, _text: str) -> Any:
            raise AssertionError("it was tokenized")

    translator = PromptTranslator(Never(), 320, 512)
    for prompt in ("x" * 8193, [{"role": "user", "content": "é" * 8193}]):
        with pytest.raises(RequestError, match="the model's 512 positions"):
            translator.encoded(prompt, Settings())


def test_a_request_alone_may_have_more_than_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MOST_BYTES", 10)
    budget = ByteBudget()
    budget.hold("one", 30)
    with pytest.raises(RequestError, match="may have 10 bytes at a time; ask again later"):
        budget.hold("other", 1)
    budget.hold("one", 8)
    budget.hold("other", 2)
    with pytest.raises(RequestError):
        budget.hold("one", 9)
    budget.hold("one", 0)
    budget.hold("other", 30)

"""Requests that fail among others: each error goes to its own client, and no text is lost."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

pytest.importorskip("fastapi", reason="needs the extra: pip install '.[serve]'")

from openai import OpenAI

from selfspec.engine import Engine
from selfspec.prompt import Prompt
from selfspec.serving.encoder import Encoder
from tests.processors import data_url, picture
from tests.serving.conftest import CHAT, seeing_client
from tests.serving.test_images import asked, text_alone


class Broken(Exception):
    """Raised on purpose."""


class Hostile:
    """A logits processor that breaks at its eighth token."""

    looks_at_rows = True

    def __init__(self) -> None:
        self.left = 8

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise Broken("on purpose")
        return scores


class Treacherous(Encoder):
    """Gives a processor that fails to prompts that ask for it."""

    def arguments_for(self, prompt: Any, settings: Any) -> Any:
        encoded, arguments = super().arguments_for(prompt, settings)
        if "hostile" in str(prompt):
            arguments["logits_processor"] = [Hostile()]
        return encoded, arguments


@pytest.fixture
def client(pair: tuple[Any, Any]) -> Iterator[Any]:
    with seeing_client(pair, Treacherous) as client:
        yield client


def told(client: Any, messages: Any, *, stream: bool) -> tuple[int, Any]:
    """The status, and the text or the error."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "stream": stream}
    response = client.post(CHAT, json=body)
    if not stream or response.status_code != 200:
        value = response.json()
        if "error" in value:
            return response.status_code, value["error"]
        return response.status_code, value["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    text = ""
    for line in lines:
        if line == "[DONE]":
            return 200, text
        event = json.loads(line)
        if "error" in event:
            assert line == lines[-1]
            return 200, event["error"]
        text += event["choices"][0]["delta"]["content"] or ""
    raise AssertionError("the stream came to no end")


FAULTS = {
    "hostile": (asked(text="hostile"), "Broken"),
    "image": (asked("data:image/png;base64,AAAA"), None),
    "long": (asked(text="fox " * 400), "context_length_exceeded"),
}
TEXTS = ("the fox", "a lazy dog", "jumps over", "class", "def read", "quick", "self", "brown")


def test_of_fifty_requests_every_fifth_fails(
    client: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, init = weakref.WeakSet[Any](), Prompt.__init__

    def noted(self: Prompt, **given: Any) -> None:
        live.add(self)
        init(self, **given)

    monkeypatch.setattr(Prompt, "__init__", noted)
    expected = {text: text_alone(pair, text=text) for text in TEXTS}
    seen = text_alone(pair, picture())

    def ask(number: int) -> tuple[int, Any]:
        if number % 5 == 0:
            messages = list(FAULTS.values())[number // 5 % 3][0]
        elif number % 7 == 0:
            messages = asked(data_url(picture()))
        else:
            messages = asked(text=TEXTS[number % 8])
        return told(client, messages, stream=number % 2 == 0)

    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(ask, range(50)))
    for number, (status, answer) in enumerate(answers):
        if number % 5:
            is_seen = number % 7 == 0
            assert (status, answer) == (200, seen if is_seen else expected[TEXTS[number % 8]])
            continue
        name, (_, code) = list(FAULTS.items())[number // 5 % 3]
        assert answer["code"] == code, name
        assert answer["type"] == ("server_error" if name == "hostile" else "invalid_request_error")
        assert answer["message"]
        if number % 2 or name in ("image", "long"):
            assert status == (500 if name == "hostile" else 400)
    session = client.thread.session
    assert session.kv_bytes_in_use == session.num_running == client.thread.num_waiting == 0
    assert session.is_empty
    gc.collect()
    assert len(live) <= 1  # The thread may hold the last one until its next.


def test_what_openais_client_makes_of_errors(client: Any) -> None:
    theirs = OpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=client, max_retries=0
    )
    ours: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    with pytest.raises(openai.InternalServerError) as caught:
        theirs.chat.completions.create(messages=FAULTS["hostile"][0], **ours)
    assert caught.value.code == "Broken"
    assert "on purpose" not in caught.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        theirs.chat.completions.create(messages=FAULTS["long"][0], **ours)
    assert refused.value.code == "context_length_exceeded"
    stream = theirs.chat.completions.create(messages=FAULTS["hostile"][0], stream=True, **ours)
    chunks: list[Any] = []
    with pytest.raises(openai.APIError) as broken:
        chunks.extend(stream)
    assert chunks
    assert broken.value.code == "Broken"


def test_a_fault_of_the_step_itself_ends_the_texts_that_run(
    client: Any, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next request is answered as ever."""

    def broken(_engine: Engine) -> None:
        raise Broken("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", broken)
        status, error = told(client, asked(), stream=False)
    assert (status, error["code"]) == (500, "Broken")
    assert told(client, asked(), stream=False) == (200, text_alone(pair))

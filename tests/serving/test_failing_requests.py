"""Requests that fail among others: each error goes to its own client, and no text is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

pytest.importorskip("fastapi", reason="needs the extra: pip install '.[serve]'")

from openai import OpenAI

from selfspec.serving.translator import PromptTranslator
from tests.processors import data_url, picture
from tests.serving.conftest import CHAT, seeing_client
from tests.serving.test_images import asked, text_alone


class Broken(Exception):
    """Raised on purpose."""


class Hostile:
    """A logits processor that breaks at its eighth token."""

    is_row_wise = True

    def __init__(self) -> None:
        self.left = 8

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise Broken("on purpose")
        return scores


class Treacherous(PromptTranslator):
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


HOSTILE = asked(text="hostile")
LONG = asked(text="fox " * 400)
FAULTS = (
    (HOSTILE, "Broken"),
    (asked("data:image/png;base64,AAAA"), None),
    (LONG, "context_length_exceeded"),
)
TEXTS = ("the fox", "a lazy dog", "jumps over", "class")


def test_faults_among_others_go_to_their_own_clients(client: Any, pair: tuple[Any, Any]) -> None:
    good = [(asked(text=text), text_alone(pair, text=text)) for text in TEXTS]
    good.append((asked(data_url(picture())), text_alone(pair, picture())))
    requests = [(*request, streams) for request in (*good, *FAULTS) for streams in (False, True)]
    with ThreadPoolExecutor(12) as clients:
        answers = clients.map(lambda ask: told(client, ask[0], stream=ask[2]), requests)
    for (messages, expected, streams), (status, answer) in zip(requests, answers, strict=True):
        if (messages, expected) in good:
            assert (status, answer) == (200, expected)
            continue
        is_late = expected == "Broken"
        assert (answer["code"], status) == (expected, (200 if streams else 500) if is_late else 400)
        assert answer["type"] == ("server_error" if is_late else "invalid_request_error")
    session = client.thread.session
    assert session.kv_bytes_in_use == session.num_running == client.thread.num_waiting == 0


def test_what_openais_client_makes_of_errors(client: Any) -> None:
    theirs = OpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=client, max_retries=0
    )
    ours: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    with pytest.raises(openai.InternalServerError) as caught:
        theirs.chat.completions.create(messages=HOSTILE, **ours)
    assert caught.value.code == "Broken"
    assert "on purpose" not in caught.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        theirs.chat.completions.create(messages=LONG, **ours)
    assert refused.value.code == "context_length_exceeded"
    stream = theirs.chat.completions.create(messages=HOSTILE, stream=True, **ours)
    chunks: list[Any] = []
    with pytest.raises(openai.APIError) as broken:
        chunks.extend(stream)
    assert chunks
    assert broken.value.code == "Broken"

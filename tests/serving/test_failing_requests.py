"""Requests that fail among others: each error goes to its own client, and no text is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from selfspec.serving.translator import PromptTranslator
from tests.batch.test_session import Fuse
from tests.processors import data_url, picture
from tests.serving.conftest import NAME, seeing_client
from tests.serving.test_images import asked, text_alone


class Treacherous(PromptTranslator):
    """Gives a processor that fails to prompts that ask for it."""

    def arguments_for(self, prompt: Any, settings: Any) -> Any:
        encoded, arguments = super().arguments_for(prompt, settings)
        if "hostile" in str(prompt):
            arguments["logits_processor"] = [Fuse(8)]
        return encoded, arguments


@pytest.fixture
def client(pair: tuple[Any, Any]) -> Iterator[Any]:
    with seeing_client(pair, Treacherous) as client:
        yield client


def told(client: Any, messages: Any, *, streams: bool) -> Any:
    """The text that OpenAI's client gets, or the error that it raises."""
    theirs = OpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=client, max_retries=0
    )
    asked = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
    try:
        answer = theirs.chat.completions.create(**asked, stream=streams)
        if not streams:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    except openai.APIError as error:
        return error


LATE = (openai.InternalServerError, "Broken", "server_error")
BAD = (openai.BadRequestError, None, "invalid_request_error")
FAULTS = (
    (asked(text="hostile"), LATE),
    (asked("data:image/png;base64,AAAA"), BAD),
    (asked(text="fox " * 400), (BAD[0], "context_length_exceeded", BAD[2])),
)
TEXTS = ("the fox", "a lazy dog", "jumps over", "class")


def test_faults_among_others_go_to_their_own_clients(client: Any, pair: tuple[Any, Any]) -> None:
    good = [(asked(text=text), text_alone(pair, text=text)) for text in TEXTS]
    good.append((asked(data_url(picture())), text_alone(pair, picture())))
    requests = [(*request, streams) for request in (*good, *FAULTS) for streams in (False, True)]
    with ThreadPoolExecutor(12) as clients:
        answers = clients.map(lambda ask: told(client, ask[0], streams=ask[2]), requests)
    for (_, expected, streams), answer in zip(requests, answers, strict=True):
        if isinstance(expected, str):
            assert answer == expected
            continue
        kind, code, type_ = expected
        # A stream has begun by then, and its last event is the error.
        assert type(answer) is (openai.APIError if streams and expected is LATE else kind)
        assert (answer.code, answer.type) == (code, type_)
        assert "on purpose" not in answer.message
    session = client.thread.session
    assert session.kv_bytes_in_use == session.num_running == client.thread.num_waiting == 0

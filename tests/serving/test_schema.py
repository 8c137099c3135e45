"""Odd requests: each is refused with the field and its rule, before the model does anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.serving.schema import Chat, Completion
from tests.serving.conftest import NAME, Served
from tests.serving.test_serving_app import MESSAGES
from tests.strategies import any_json

CHAT, COMPLETION = "chat/completions", "completions"
PLAIN: dict[str, Any] = {"model": NAME, "max_tokens": 1, "temperature": 0}
OF_PATH: dict[str, dict[str, Any]] = {
    CHAT: {**PLAIN, "messages": MESSAGES},
    COMPLETION: {**PLAIN, "prompt": "def"},
}


def refused(served: Served, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
    before = served.spec.total_stats.num_calls
    headers = {"content-type": "application/json"}
    data = json.dumps(body).encode()  # Halves of characters are escaped.
    response = served.client.post(f"/v1/{path}", content=data, headers=headers)
    assert response.status_code == status, response.text
    assert served.spec.total_stats.num_calls == before
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error


IMAGE = {"type": "image_url", "image_url": "file:///etc"}
USER = {"role": "user", "content": "x"}
EITHER: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, "x", 1.5, True, 10**12, [], {}, 513),
    "n": (0, -1, 17, "two", 1.0),
    "seed": (-1, 2**64, 1.5, "x", True),
    "stop": ([], "", [""], ["a"] * 5, ["x"] * 3000, "y" * 33, 7, [7]),
    "temperature": (-0.1, 2.1, "hot", 1e-9, 10**400, [0.5], True),
    "top_p": (-0.1, 1.1, "x"),
    "top_k": (-1, 1.5, 10**9),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0, -1, 1000, "x"),
    "frequency_penalty": (0.5, -1, "x", True),
    "presence_penalty": (0.5, []),
    "stream": ("yes", 1, []),
    "stream_options": ({"include_usage": True}, [], "x"),
    "user": (7, ["x"]),
    "logprobs": (True, 1, "x"),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"999999": 1}, {"1": 101}, {"1": "x"}, [1], "x", {"١": 1}),
    "prediction": ("x", {}, [], {"type": "content"}, {"type": "content", "content": 7}, IMAGE),
    "nonsense": (1,),
}
OF_CHATS: dict[str, tuple[Any, ...]] = {
    "messages": (
        *(None, [], "x", {}, [7], [{}], [{"role": "user"}]),
        *([{**USER, "role": "wizard"}], [{**USER, "role": ["user"]}], [{**USER, "content": 7}]),
        *([{**USER, "content": [IMAGE]}], [{**USER, "tool_calls": []}]),
        [{**USER, "content": "\ud800"}],
    ),
    "max_completion_tokens": (2, 0),
    "tools": ([{"type": "function"}], "x"),
    "tool_choice": ("auto",),
    "functions": ([{}],),
    "response_format": ({"type": "json_object"},),
    "modalities": (["audio"],),
    "audio": ({"voice": "x"},),
    "store": (True,),
    "metadata": ("x",),
    "top_logprobs": (3,),
    "reasoning_effort": ("high",),
    "prompt": ("x",),
}
OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "prompt": (
        *(None, [], 7, {}, [[]], [[7], "x", {}], "", ["x"] * 17),
        *([-1], [10**9], [[10**30]], [True], "\ud800", [1.5]),
    ),
    "echo": (True,),
    "suffix": ("x",),
    "best_of": (3,),
    "messages": (MESSAGES,),
}
OF = {CHAT: (EITHER, OF_CHATS), COMPLETION: (EITHER, OF_COMPLETIONS)}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (path, name, value)
        for path, fields in OF.items()
        for each in fields
        for name, values in each.items()
        for value in values
    ],
)
def test_each_field_has_a_rule(served: Served, path: str, name: str, value: Any) -> None:
    error = refused(served, path, {**OF_PATH[path], name: value})
    assert error["param"] == name
    assert name in error["message"]


def test_other_models_are_refused(served: Served) -> None:
    for model in ("other", "/etc", "../..", "org/model", ""):
        error = refused(served, CHAT, {**OF_PATH[CHAT], "model": model}, status=404)
        assert error["param"] == "model"
    assert refused(served, COMPLETION, {"prompt": "def"})["param"] == "model"


def test_what_never_fits_is_refused(served: Served) -> None:
    long = {"prompt": "the quick brown fox " * 400}
    error = refused(served, COMPLETION, {**PLAIN, **long})
    assert "must fit into the model's 512 positions" in error["message"]
    error = refused(served, COMPLETION, {**PLAIN, "prompt": "the quick", "max_tokens": 512})
    assert error["param"] == "max_tokens"
    with pytest.MonkeyPatch.context() as patch:
        limits = served.thread.session._limits
        assert limits is not None
        patch.setattr(served.thread.session, "_limits", limits._replace(max_tokens=30))
        error = refused(served, COMPLETION, {**PLAIN, "prompt": "the quick", "max_tokens": 64})
    assert "must fit into the 30 tokens" in error["message"]


def test_without_a_length_an_answer_ends_with_the_context(served: Served) -> None:
    told = served.ask(COMPLETION, prompt="the quick", temperature=0, logit_bias={"1": -100})
    assert told["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"model": NaN}', "model must be a valid string (got nan)"),
        (b'{"model": ' + b"[" * 100_000, "must be JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "must be JSON"),
        (b"\xff\xfe\x00", "must be JSON"),
    ],
)
def test_bodies_that_are_no_json(served: Served, data: bytes, said: str) -> None:
    headers = {"content-type": "application/json"}
    response = served.client.post("/v1/completions", content=data, headers=headers)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_bodies_that_are_too_long_or_of_another_kind(served: Served) -> None:
    body = json.dumps({**OF_PATH[COMPLETION], "user": "x" * (1 << 20)}).encode()
    headers = {"content-type": "application/json"}

    def parts() -> Any:  # Nobody says how long it will be.
        yield body[: 1 << 19]
        yield body[1 << 19 :]

    for content in (body, parts()):
        response = served.client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert "at most 1048576 bytes" in response.json()["error"]["message"]
    plain = {"content-type": "text/plain"}
    response = served.client.post("/v1/completions", content=b"{}", headers=plain)
    assert response.status_code == 415


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(list(OF_PATH)),
    odd=st.dictionaries(
        st.sampled_from(sorted({*Chat.model_fields, *Completion.model_fields})),
        any_json,
        max_size=2,
    ),
)
def test_whatever_comes_there_is_an_answer(served: Served, path: str, odd: dict[str, Any]) -> None:
    """A text, or a refusal that names one of the fields; never a fault of the server."""
    data = json.dumps({**OF_PATH[path], **odd}).encode()
    headers = {"content-type": "application/json"}
    response = served.client.post(f"/v1/{path}", content=data, headers=headers)
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error = response.json()["error"]
        assert error["param"] in odd or "must be JSON" in error["message"]

"""Odd requests: each is refused with the field and its rule, before the model does anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.serving.fields import RequestError, checked
from selfspec.serving.schema import Chat, Completion
from tests.serving.conftest import CHAT, COMPLETION, MESSAGES, NAME, Served
from tests.strategies import any_json

PLAIN: dict[str, Any] = {"model": NAME, "max_tokens": 1, "temperature": 0}
OF_PATH: dict[str, dict[str, Any]] = {
    CHAT: {**PLAIN, "messages": MESSAGES},
    COMPLETION: {**PLAIN, "prompt": "def"},
}


def refused(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    before = served.spec.total_stats.num_calls
    response = served.post(path, body)
    assert response.status_code == status, response.text
    assert served.spec.total_stats.num_calls == before
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error


IMAGE = {"type": "image_url", "image_url": "file:///etc"}
USER = {"role": "user", "content": "x"}
EITHER: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -2, "x", 1.5, True, 10**12, [], {}, 513),
    "n": (0, -1, 17, "two", 1.0),
    "seed": (-2, 2**64, 1.5, "x", True),
    "stop": ("", [""], ["a"] * 5, "y" * 257, 7, [7]),
    "temperature": (-0.1, 2.1, "hot", [0.5], True),
    "top_p": (-0.1, 1.1, "x"),
    "top_k": (-2, 1.5, 10**9),
    "repetition_penalty": (0, -1, 1000, "x"),
    "frequency_penalty": (2.1, -3, "x", True),
    "presence_penalty": (2.1, []),
    "min_tokens": (-1, 1.5, 2, 10**9, True),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"999999": 1}, {"1": 101}, {"1": "x"}, [1], "x", {"١": 1}),
    "prediction": ("x", {}, [], {"type": "content"}, {"type": "content", "content": 7}, IMAGE),
    "nonsense": (1,),
}
OF_CHATS: dict[str, tuple[Any, ...]] = {
    "messages": (
        *(None, [], "x", {}, [7], [{}], [{"role": "user"}]),
        *([{**USER, "role": "wizard"}], [{**USER, "role": ["user"]}], [{**USER, "content": 7}]),
        *([{**USER, "content": [IMAGE]}], [{**USER, "tool_calls": [{}]}]),
    ),
    "max_completion_tokens": (0,),
    "tools": ([{"type": "function"}], "x"),
    "tool_choice": ("required",),
    "response_format": ({"type": "xml"}, {"type": "json_schema"}, "x"),
    "modalities": (["audio"],),
    "logprobs": (5, "x", [True]),
    "top_logprobs": (3, -1, 10**9, "x"),
    "chat_template_kwargs": ("x", {"chat_template": "{{ 1 }}"}, {"tokenize": False}),
    "prompt": ("x",),
}
OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "prompt": (
        *(None, [], 7, {}, [[]], [[7], "x", {}], "", ["x"] * 17),
        *([-1], [10**9], [[10**30]], [True], [1.5]),
    ),
    "logprobs": (True, -1, 21, 10**9, 1.5, "x"),
    "suffix": ("x",),
    "best_of": (3,),
    "messages": (MESSAGES,),
}


@pytest.mark.parametrize(("path", "own"), [(CHAT, OF_CHATS), (COMPLETION, OF_COMPLETIONS)])
def test_each_field_has_a_rule(served: Served, path: str, own: dict[str, Any]) -> None:
    models = ("other", "/etc", "../..", "org/model", "")
    for name, values in {"model": models, **EITHER, **own}.items():
        for value in values:
            status = 404 if name == "model" else 400
            error = refused(served, path, {**OF_PATH[path], name: value}, status)
            assert error["param"].partition("[")[0] == name, value
            assert name in error["message"]


TEXT_OR_LIST = "Input should be a valid string, or Input should be a valid list"
OBJECT = "Input should be a valid dictionary"
FORMS: list[tuple[str, Any, str]] = [
    ("tool_choice", "x", f": Input should be 'none', 'auto' or 'required', or {OBJECT}"),
    (
        "tool_choice",
        {"type": "function", "function": {"name": "a b"}},
        ".function.name: String should match pattern '^[a-zA-Z0-9_-]{1,64}$' (got 'a b')",
    ),
    ("tool_choice", {"type": "function"}, ".function: Field required"),
    ("stop", "y" * 257, ": String should have at most 256 characters, or Input should be a "),
    ("stop", ["a", 7], "[1]: Input should be a valid string (got 7)"),
    ("stop", 7, f": {TEXT_OR_LIST} (got 7)"),
    ("prediction", "x", f": {OBJECT}"),
    ("logit_bias", {"x": 1}, ".x: String should match pattern"),
    ("store", True, ": Input should be False (got True)"),
    ("nonsense", 1, ": Extra inputs are not permitted (got 1)"),
    ("temprature", 1, ": Extra inputs are not permitted; did you mean 'temperature'? (got 1)"),
]


@pytest.mark.parametrize(("field", "value", "said"), FORMS)
def test_the_message_names_what_is_wrong_in_a_field_of_several_forms(
    field: str, value: Any, said: str
) -> None:
    with pytest.raises(RequestError) as raised:
        checked(Chat, {"messages": MESSAGES, field: value})
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}{said}")


@pytest.fixture
def few_positions(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an answer to the end of the context is short."""
    monkeypatch.setitem(vars(served.translator), "max_positions", 64)  # It is frozen.


@pytest.mark.usefixtures("few_positions")
def test_the_words_of_others_for_none(served: Served) -> None:
    """vLLM's clients send -1; a temperature that is almost 0 means 0."""
    for path, body in OF_PATH.items():
        plain = {**body, "max_tokens": 5}
        expected = served.ask(path, **plain)["choices"]
        sent: dict[str, Any] = {"top_k": -1, "seed": -1, "stop": [], "temperature": 1e-9}
        assert served.ask(path, **{**plain, **sent})["choices"] == expected
        longest = served.ask(path, **{**body, "max_tokens": -1})
        assert longest["usage"]["completion_tokens"] > 5


def test_what_clients_send_back_of_a_conversation(served: Served) -> None:
    """From our own replies and from those of others, which have more fields, known or not."""
    call = {"id": "call_1", "index": 0, "type": "function"}
    call["function"] = {"name": "weather", "arguments": "{}"}
    part = {"type": "text", "text": "the quick", "cache_control": {"type": "ephemeral"}}
    history = [
        {"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "annotations": [], "refusal": None, "mood": 1},
        {"role": "assistant", "content": "fox", "reasoning_content": "hm", "function_call": None},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    plain = [
        {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "fox"},
        {
            "role": "assistant",
            "tool_calls": [{each: call[each] for each in call if each != "index"}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    asked = {**PLAIN, "max_tokens": 6}
    expected = served.ask(CHAT, messages=plain, **asked)["choices"]
    assert served.ask(CHAT, messages=history, **asked)["choices"] == expected
    thoughts = [
        each.as_dict().get("reasoning_content")
        for each in checked(Chat, {"messages": history}).messages
    ]
    assert thoughts == [None, None, "hm", "hm", None]


NOTHING: dict[str, dict[str, Any]] = {
    CHAT: {
        **{"store": False, "modalities": ["text"], "response_format": {"type": "text"}},
        **{"tools": [], "top_logprobs": 0, "logprobs": False},
    },
    COMPLETION: {"best_of": 1, "suffix": "", "echo": False},
}


def test_what_asks_for_nothing_is_no_fault(served: Served) -> None:
    """In OpenAI's protocol and in vLLM's."""
    for path, body in OF_PATH.items():
        extra = {"presence_penalty": 0, "max_completion_tokens": -1, **NOTHING[path]}
        extra |= dict.fromkeys(["stop", "n", "user", "conversation", "audio"])
        assert served.ask(path, **{**extra, **body})["choices"]


@pytest.mark.usefixtures("few_positions")
def test_what_never_fits_is_refused(served: Served) -> None:
    error = refused(served, COMPLETION, {**PLAIN, "prompt": "the quick brown fox " * 400})
    assert "64 positions" in error["message"]
    error = refused(served, COMPLETION, {**PLAIN, "prompt": "the quick", "max_tokens": 64})
    assert error["param"] == "max_tokens"
    # Without a length an answer ends with the context.
    told = served.ask(COMPLETION, prompt="the quick", temperature=1, logit_bias={"1": -100})
    assert told["usage"]["total_tokens"] == 64


LONG = json.dumps({**OF_PATH[COMPLETION], "user": "x" * (1 << 20)}).encode()


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        *((data, 400, "JSON") for data in (b"", b"{", b"[1]", b"\xff\xfe\x00")),
        (b'{"model": NaN}', 400, "JSON"),
        (b'{"prompt": "\\ud800"}', 400, "JSON"),  # Half of a character.
        (b'{"model": ' + b"[" * 100_000, 400, "JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "JSON"),
        (LONG, 413, "1048576 bytes"),
        (iter([LONG[:9], LONG[9:]]), 413, "1048576 bytes"),  # Nobody says how long it is.
    ],
    ids=range(10),
)
def test_bodies_that_are_none(served: Served, data: Any, status: int, said: str) -> None:
    response = served.post(COMPLETION, data)
    assert response.status_code == status
    assert said in response.json()["error"]["message"]


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(list(OF_PATH)),
    odd=st.dictionaries(
        st.sampled_from(sorted({*Chat.model_fields, *Completion.model_fields, "functions"})),
        any_json,
        max_size=2,
    ),
)
def test_whatever_comes_there_is_an_answer(served: Served, path: str, odd: dict[str, Any]) -> None:
    """A text, or a refusal that names one of the fields; never a fault of the server."""
    response = served.post(path, {**OF_PATH[path], **odd})
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error = response.json()["error"]
        assert error["param"] in odd or "must be JSON" in error["message"]

"""`/v1/responses`: a chat in other words. Each response is the reply to the same chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from pydantic import BaseModel

from selfspec.serving.fields import RequestError, checked
from selfspec.serving.responses import Responses
from selfspec.serving.schema import Chat
from tests.processors import data_url, picture
from tests.serving.conftest import CHAT, NAME, Served, seeing_client
from tests.serving.test_schemas import WEATHER
from tests.strategies import any_json

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
HISTORY = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the quick"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "c2", "output": "dark", "status": "completed"},
    {"role": "developer", "content": "be brief"},
]


def called(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}}


AS_CHAT = [
    {"role": "system", "content": "You are a fox."},
    {"role": "user", "content": "the quick"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [called("c1"), called("c2")]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c2", "content": "dark"},
    {"role": "developer", "content": "be brief"},
]


def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, in order, each with its name in front of it."""
    response = served.post(PATH, {"stream": True, **body})
    assert response.status_code == 200, response.text
    events = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def test_items_are_the_messages_of_a_chat(served: Served) -> None:
    asked = {"input": HISTORY, "instructions": "You are a fox."}
    assert checked(Responses, asked).prompts == checked(Chat, {"messages": AS_CHAT}).prompts


def test_nulls_and_defaults_count_as_left_out(served: Served) -> None:
    """As in what clients make of an earlier response."""
    asked = {"input": "the quick", "temperature": 0, "max_output_tokens": 4}
    expected = served.ask(PATH, **asked)
    repeated = {**expected, "reasoning": {"effort": None, "summary": "auto"}}
    repeated["text"] = {**expected["text"], "verbosity": "low"}
    item = {"type": None, "role": "user", "content": "the quick", "id": None, "status": None}
    names = ("tools", "tool_choice", "text", "reasoning", "truncation", "metadata", "top_p")
    again = {name: repeated[name] for name in names}
    response = served.ask(PATH, **{**asked, **again, "input": [HISTORY[1], item]})
    assert response["output"][0]["content"] == expected["output"][0]["content"]
    served.ask(PATH, **asked | {"input": [{"role": "assistant"}]})
    details = expected["usage"]["input_tokens_details"]
    assert {**details, "cached_tokens": 0} == {"cached_tokens": 0, "cache_write_tokens": 0}
    in_file = served.in_file(asked)
    assert (in_file["object"], in_file["output"][0]["content"]) == (
        "response",
        expected["output"][0]["content"],
    )


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "stop": ["x", " "]},
    {"temperature": 0.7, "top_p": 0.8, "seed": 3, "stop": []},
    {"temperature": 1.3, "presence_penalty": -0.5, "seed": 9, "metadata": {"a": "b"}, "user": "me"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_response_is_the_reply_to_the_same_chat(
    served: Served, options: dict[str, Any], has_history: bool, streams: bool
) -> None:
    last = {"role": "user", "content": "the quick\t\u00e9"}
    items = [*HISTORY, last] if has_history else last["content"]
    messages = [*AS_CHAT, last] if has_history else [last]
    own = {"instructions": "You are a fox."} if has_history else {}
    for length in (1, 12):
        chat = served.ask(CHAT, messages=messages, max_tokens=length, **options)
        body = {"input": items, "max_output_tokens": length, **own, **options}
        if streams:
            *_, last_event = events_of(served, **body)
            response = last_event["response"]
            assert last_event["type"] == f"response.{response['status']}"
        else:
            response = served.ask(PATH, **body)
        (choice,), (item,) = chat["choices"], response["output"]
        assert item["content"][0]["text"] == choice["message"]["content"]
        is_cut = choice["finish_reason"] == "length"
        assert response["status"] == item["status"] == ("incomplete" if is_cut else "completed")
        reason = {"reason": "max_output_tokens"} if is_cut else None
        assert response["incomplete_details"] == reason
        numbers = [response["usage"][f"{name}_tokens"] for name in ("input", "output", "total")]
        names = ("prompt", "completion", "total")
        assert numbers == [chat["usage"][f"{name}_tokens"] for name in names]
        assert response["max_output_tokens"] == length
        assert response["temperature"] == options["temperature"]
        assert (response["store"], response["previous_response_id"]) == (False, None)


def test_openais_client_and_its_helpers(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "the quick", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=8)
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "the quick"}], temperature=0, max_tokens=8
    )
    assert whole.output_text == chat.choices[0].message.content
    with client.responses.stream(**asked, extra_body={"logit_bias": {"1": 100}}) as stream:
        assert stream.get_final_response().output_text == ""
    scored = client.responses.create(
        **asked, max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2
    )
    scores = scored.output[0].content[0].logprobs
    assert [len(each.top_logprobs) for each in scores] == [2, 2, 2]


def test_tools_and_schemas(client: OpenAI) -> None:
    pytest.importorskip("llguidance", reason="needs the extra: pip install '.[grammar]'")

    class Answer(BaseModel):
        days: int

    asked: dict[str, Any] = {"model": NAME, "input": "the quick", "temperature": 0}
    parsed = client.responses.parse(**asked, text_format=Answer, max_output_tokens=60)
    assert parsed.output_parsed is None or isinstance(parsed.output_parsed, Answer)
    assert parsed.output_text.startswith('{"days": ')
    asked |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.responses.create(**asked, max_output_tokens=160)
    (call,) = called.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with client.responses.stream(**asked, max_output_tokens=160) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked["input"] = [{"role": "user", "content": "the quick"}, *called.output, output]
    assert client.responses.create(**asked, max_output_tokens=160).output[0].type == "function_call"


def test_images(pair: tuple[Any, Any]) -> None:
    url = data_url(picture(0))
    parts = [{"type": "text", "text": "the fox"}, {"type": "image_url", "image_url": {"url": url}}]
    items = [
        {"type": "input_text", "text": "the fox"},
        {"type": "input_image", "image_url": url, "detail": "auto", "file_id": None},
    ]
    with seeing_client(pair) as client:
        same = {"temperature": 0, "seed": 1}
        messages = [{"role": "user", "content": parts}]
        chat = client.post(CHAT, json={"messages": messages, "max_tokens": 9, **same}).json()
        body = {"input": [{"role": "user", "content": items}], "max_output_tokens": 9, **same}
        response = client.post(PATH, json=body).json()
    text = response["output"][0]["content"][0]["text"]
    assert text == chat["choices"][0]["message"]["content"]


def test_images_are_named_by_their_numbers(served: Served) -> None:
    image = {"type": "input_image", "image_url": "no image"}
    text = {"type": "input_text", "text": "look"}
    last = {"role": "user", "content": [text, image]}
    body = {"input": [*HISTORY, last], "instructions": "You are a fox."}
    error = served.post(PATH, body).json()["error"]
    assert error["param"] == "input"
    assert error["message"].startswith("image 1 of input must be ")


UNKNOWN = ": Extra inputs are not permitted"
WRONG: list[tuple[str, Any, str]] = [
    ("input", 7, ": must be text or a list of items (got 7)"),
    ("input", [{"type": "web_search_call"}], ": must be items that are messages, or calls"),
    ("input", [{"role": "wizard", "content": "x"}], "[0].role: Input should be 'system', "),
    ("input", [HISTORY[1], {"role": "wizard", "content": "x"}], "[1].role: Input should be "),
    ("input", [{"type": "function_call", "call_id": "c", "name": "x"}], "[0].arguments: Field "),
    ("input", [{"role": "user", "content": [{"type": "input_file"}]}], ": must have contents of "),
    ("previous_response_id", "resp_1", UNKNOWN),
    ("conversation", "conv_1", UNKNOWN),
    ("input", [HISTORY[1]], ": must have an item beside those of reasoning"),
    ("input", [{"role": "user", "content": [{"type": "input_image"}]}], ": must have contents of "),
    ("top_logprobs", 2, " must come with include: ['message.output_text.logprobs'] (got 2)"),
    ("tools", [TOOL] * 129, ": List should have at most 128 items"),
    ("background", True, ": Input should be False (got True)"),
    ("truncation", "auto", ": Input should be 'disabled' (got 'auto')"),
    ("tools", [{"type": "web_search"}], "[0].type: Input should be 'function' (got 'web_search')"),
    ("tools", [{"type": "function", "name": "a b"}], "[0].name: String should match pattern"),
    ("tool_choice", {"type": "allowed_tools"}, ".type: Input should be 'function'"),
    ("text", {"format": {"type": "xml"}}, ": Input should be 'json_object' or 'json_schema'"),
    ("max_output_tokens", 0, ": Input should be greater than or equal to 1 (got 0)"),
    ("include", "all", ": must be a list (got 'all')"),
    ("n", 2, ": Input should be 1 (got 2)"),
    ("max_output_tokens", 513, ""),
]


@pytest.mark.parametrize(("field", "value", "said"), WRONG)
def test_what_is_refused(served: Served, field: str, value: Any, said: str) -> None:
    response = served.post(PATH, {"input": "x", field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}{said}" if said else "prompt and answer must fit")


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(odd=st.dictionaries(st.sampled_from(["input", "text", *Responses.model_fields]), any_json))
def test_whatever_comes_there_is_an_answer(odd: dict[str, Any]) -> None:
    error = None
    try:
        checked(Responses, {"input": "x", **odd})
    except RequestError as refusal:
        error = refusal
    assert error is None or (error.field in odd and error.field in str(error))


def test_a_stream_that_breaks_off_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("selfspec.engine.Engine.step", broken)
    *_, last = events_of(served, input="the quick", max_output_tokens=9)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "RuntimeError"
    assert "on purpose" not in json.dumps(last)

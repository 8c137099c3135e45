"""Answers that keep to a schema, and calls of tools, as a client of OpenAI asks for them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.serving.conftest import CHAT, MESSAGES, NAME, Served

pytest.importorskip("llguidance", reason="needs the extra: pip install '.[grammar]'")


class Parcel(BaseModel):
    size: Literal["small", "large"]
    ready: bool


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 120, "temperature": 0}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": fields}}


def test_an_answer_is_parsed_into_a_model(client: OpenAI, served: Served) -> None:
    whole = client.chat.completions.parse(response_format=Parcel, **ASKED).choices[0]
    assert isinstance(whole.message.parsed, Parcel)
    assert whole.finish_reason == "stop"
    assert served.spec.total_stats.accepted_by_source["grammar"] > 0
    with client.chat.completions.stream(response_format=Parcel, **ASKED) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.parsed == whole.message.parsed


def test_several_choices_have_a_processor_each(served: Served) -> None:
    told = served.ask(CHAT, **ASKED | {"n": 3, "temperature": 1}, response_format=schema(enum=[7]))
    assert [choice["message"]["content"] for choice in told["choices"]] == ["7"] * 3


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(180):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"response_format": schema(type="objekt")}, "objekt"),
        ({"response_format": schema(**{"$ref": "#"})}, "schema"),
        ({"response_format": schema(**NESTED)}, "recursion"),
        ({"response_format": schema(enum=["x" * 200] * 1000)}, "characters"),
        ({"tools": [{"type": "function", "function": {}}]}, "name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "paramters": {}}}]},
            "paramters",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "b"),
        ({"tools": [WEATHER], "response_format": schema()}, "response_format"),
    ],
)
def test_what_can_not_be_had_is_told(served: Served, body: dict[str, Any], told: str) -> None:
    response = served.post(CHAT, {**ASKED, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] in body
    assert served.ask(CHAT, **ASKED | {"max_tokens": 1})

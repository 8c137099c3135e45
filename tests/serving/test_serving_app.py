"""The protocol: what a client of OpenAI asks and gets, from the same thread of the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.conftest import NAME, Served

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
CHAT, COMPLETION = "chat/completions", "completions"


def chat_ids(served: Served, messages: Any = MESSAGES) -> list[int]:
    tokenizer = served.tokenizer
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def events(served: Served, path: str, **body: Any) -> list[Any]:
    """The events of a stream; the last line says that it is done."""
    asked = {"model": NAME, "stream": True, **body}
    response = served.client.post(f"/v1/{path}", json=asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line for line in response.text.split("\n\n") if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.2, "seed": 3, "top_p": 0.8, "top_k": 9, "min_p": 0.02},
        {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": {"70": 4}},
        {"seed": 2**62},
    ],
)
def test_answers_are_those_of_generate(served: Served, options: dict[str, Any]) -> None:
    """What is left out is as the model's own generation config has it."""
    stock = {k: v for k, v in options.items() if k not in ("seed", "logit_bias", "temperature")}
    if "temperature" in options:
        stock["do_sample"] = options["temperature"] > 0
        stock |= {"temperature": options["temperature"]} if stock["do_sample"] else {}
    if "logit_bias" in options:
        stock["sequence_bias"] = {(70,): 4.0}
    seed = options.get("seed", 0)
    expected = served.text_alone(chat_ids(served), seed, max_new_tokens=20, **stock)
    told = served.ask(CHAT, messages=MESSAGES, max_tokens=20, **options)
    (choice,) = told["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    streamed = events(served, CHAT, messages=MESSAGES, max_tokens=20, **options)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert "".join(delta.get("content", "") for delta in deltas) == expected
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert streamed[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_usage_and_reasons_to_finish(served: Served) -> None:
    asked = {"prompt": "def read(", "max_tokens": 6, "temperature": 0}
    told = served.ask(COMPLETION, **asked)
    num_ids = len(served.tokenizer("def read(")["input_ids"])
    assert (told["object"], told["model"]) == ("text_completion", NAME)
    assert told["choices"][0]["finish_reason"] == "length"
    counts = {"prompt_tokens": num_ids, "completion_tokens": 6, "total_tokens": num_ids + 6}
    assert told["usage"].items() >= counts.items()
    assert all("usage" not in each for each in events(served, COMPLETION, **asked))
    *_, last = events(served, COMPLETION, stream_options={"include_usage": True}, **asked)
    assert (last["usage"], last["choices"]) == (told["usage"], [])


def test_prompts_of_every_form_and_several_choices(served: Served) -> None:
    ids = served.tokenizer("class Queue")["input_ids"]
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.8, "seed": 4}
    told = served.ask(COMPLETION, prompt=["class Queue", "def"], n=2, **options)
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    for number, choice in enumerate(told["choices"][:2]):
        stock: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.8}
        assert choice["text"] == served.text_alone(ids, 4 + number, **stock)
    for prompt in (ids, [ids]):
        given = served.ask(COMPLETION, prompt=prompt, **options)
        assert given["choices"][0]["text"] == told["choices"][0]["text"]


def test_the_developer_is_the_system(served: Served) -> None:
    told, expected = (
        served.ask(
            CHAT, messages=[{"role": role, "content": "be short"}, *MESSAGES], temperature=0, n=1
        )
        for role in ("developer", "system")
    )
    assert told["choices"] == expected["choices"]


def test_stop_strings_are_not_in_the_text(served: Served) -> None:
    asked = {"prompt": "the quick", "max_tokens": 60, "temperature": 0}
    whole = served.ask(COMPLETION, **asked)["choices"][0]["text"]
    stop = next(
        part for n in range(4, 40) if (part := whole[n : n + 2]).isalnum() and part.isascii()
    )
    told = served.ask(COMPLETION, stop=[stop, "never there"], **asked)
    (choice,) = told["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert told["usage"]["completion_tokens"] < 60
    streamed = events(served, COMPLETION, stop=stop, **asked)
    assert "".join(each["choices"][0]["text"] for each in streamed) == choice["text"]


def test_a_prediction_is_drafted_from_and_counted(served: Served) -> None:
    asked = {"prompt": "the quick", "max_tokens": 40, "temperature": 0}
    before = served.ask(COMPLETION, **asked)
    text = before["choices"][0]["text"]
    parts = [{"type": "text", "text": "nothing like that at all"}]
    for content, count in ((text, "accepted"), (parts, "rejected")):
        prediction = {"type": "content", "content": content}
        told = served.ask(COMPLETION, prediction=prediction, **asked)
        assert told["choices"] == before["choices"]
        assert told["usage"]["completion_tokens_details"][f"{count}_prediction_tokens"] > 0


def test_the_routes_that_are_meant_and_no_others(served: Served) -> None:
    get = served.client.get
    assert get("/health").json() == {"status": "ok"}
    listed = get("/v1/models").json()
    assert [each["id"] for each in listed["data"]] == [NAME]
    assert get(f"/v1/models/{NAME}").json() == listed["data"][0]
    assert get("/v1/models/other/one").status_code == 404
    routes = ("/", "/docs", "/openapi.json", "/reset", "/load_model", "/v1/audio/transcriptions")
    for route in (*routes, "/v1/responses", "/v1/embeddings", "/v1/chat/completions/", "/stats"):
        for response in (get(route), served.client.post(route, json={"model": "/etc"})):
            assert response.status_code in (404, 405), route
            assert response.json()["error"]["code"] == "no_such_route"
    response = get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


def test_statistics_and_metrics(served: Served) -> None:
    served.ask(COMPLETION, prompt="def", max_tokens=8, temperature=0)
    stats = served.client.get("/selfspec/stats").json()
    assert stats["num_calls"] > 0
    assert stats["server"]["requests_by_status"]["200"] > 0
    assert stats["server"]["num_running"] == stats["server"]["num_waiting"] == 0
    assert stats["server"]["tokens_per_second"] > 0
    text = served.client.get("/metrics").text
    for name in (
        'selfspec_requests_total{route="/v1/completions",status="200"}',
        "selfspec_texts_waiting 0.0",
        "selfspec_texts_running 0.0",
        "selfspec_tokens_per_second ",
        "selfspec_tokens_per_step ",
        "selfspec_time_to_first_token_seconds_count ",
        "selfspec_kv_bytes 0.0",
        "selfspec_kv_bytes_limit 1.6777216e+07",
    ):
        assert name in text, name


def test_a_fault_ends_no_more_than_it_has_to(served: Served, monkeypatch: Any) -> None:
    """The model's thread goes on, and so does the next request."""
    session = served.thread.session
    monkeypatch.setattr(session, "step", lambda: [][1])
    body = {"model": NAME, "prompt": "def", "max_tokens": 4}
    response = served.client.post("/v1/completions", json=body)
    assert response.status_code == 500
    assert "fault of the server" in response.json()["error"]["message"]
    assert "list index" not in response.text
    assert served.ask(COMPLETION, prompt="def", max_tokens=4, temperature=0)

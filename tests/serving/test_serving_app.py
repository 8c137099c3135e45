"""The protocol: what a client of OpenAI asks and gets, from the same thread of the model."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.batch.text_stream import TextStream
from selfspec.serving.reply_decoder import StopFinder
from tests.serving.conftest import CHAT, COMPLETION, MESSAGES, NAME, Served


def events(served: Served, path: str, **body: Any) -> list[Any]:
    """The events of a stream; the last line says that it is done."""
    response = served.post(path, {"model": NAME, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line for line in response.text.split("\n\n") if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def metrics(served: Served) -> dict[str, str]:
    lines = served.client.get("/metrics").text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines)


@pytest.mark.parametrize("choice", [{}, {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02}])
def test_answers_are_those_of_generate(served: Served, choice: dict[str, Any]) -> None:
    """What is left out is as the model's own generation config has it."""
    ids = served.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    stock: dict[str, Any] = {**choice, **({"do_sample": True} if choice else {})}
    expected = served.text_alone(ids, 7, max_new_tokens=20, repetition_penalty=1.1, **stock)
    asked = {"messages": MESSAGES, "max_tokens": 20, "repetition_penalty": 1.1, "seed": 7, **choice}
    told = served.ask(CHAT, **asked)
    (whole,) = told["choices"]
    assert whole["message"] == {"role": "assistant", "content": expected}
    assert (told["object"], told["model"]) == ("chat.completion", NAME)
    counts = {"prompt_tokens": len(ids), "completion_tokens": 20, "total_tokens": len(ids) + 20}
    assert told["usage"].items() >= counts.items()
    *streamed, last = events(served, CHAT, stream_options={"include_usage": True}, **asked)
    assert (last["usage"], last["choices"]) == (told["usage"], [])
    chunks = [each["choices"][0] for each in streamed]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["delta"]["content"] for each in chunks) == expected
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_prompts_of_every_form_and_several_choices(served: Served) -> None:
    ids = served.tokenizer("class Queue")["input_ids"]
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.8, "seed": 4}
    told = served.post(COMPLETION, {"prompt": ["class Queue", "def"], "n": 2, **options}).json()
    assert told["model"] == NAME  # A request need not name the only one.
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    stock: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.8}
    for number, choice in enumerate(told["choices"][:2]):
        assert choice["text"] == served.text_alone(ids, 4 + number, **stock)
    for prompt in (ids, [ids]):
        given = served.ask(COMPLETION, prompt=prompt, **options)
        assert given["choices"][0]["text"] == told["choices"][0]["text"]


def test_stop_strings_are_not_in_the_text(served: Served) -> None:
    asked = {"prompt": "the quick", "max_tokens": 60, "temperature": 0}
    whole = served.ask(COMPLETION, **asked)["choices"][0]["text"]
    parts = (whole[n : n + 2] for n in range(4, 40))
    stop = next(part for part in parts if part.isalnum() and part.isascii())
    told = served.ask(COMPLETION, stop=[stop, "never there"], **asked)
    (choice,) = told["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert told["usage"]["completion_tokens"] < 60
    assert served.choices_in_file({**asked, "stop": stop}) == told["choices"]
    streamed = events(served, COMPLETION, stop=stop, **asked)
    assert "".join(each["choices"][0]["text"] for each in streamed) == choice["text"]


@given(
    pieces=st.lists(st.text(alphabet="abé", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    finder, sent, text, is_stopped = StopFinder(stops), "", "", False
    for piece in pieces:
        if is_stopped:
            break
        text += piece
        more, is_stopped = finder.add(piece)
        sent += more
        assert not any(stop in sent for stop in stops)
    is_there = any(stop in text for stop in stops)
    assert is_stopped == is_there
    # A stop string that is complete ends the text, even if a longer one began before it.
    sent += finder.rest()
    assert text.startswith(sent) if is_there else sent == text


def test_a_prediction_is_drafted_from_and_counted(served: Served) -> None:
    """Each text is new to the server, which would draft it from memory otherwise."""
    wrong = [{"type": "text", "text": "nothing like that at all"}]
    for prompt, is_right in (("jumps over", True), ("self.file", False)):
        ids = served.tokenizer(prompt)["input_ids"]
        text = served.text_alone(ids, max_new_tokens=40)
        prediction = {"type": "content", "content": text if is_right else wrong}
        asked = {"prompt": prompt, "max_tokens": 40, "temperature": 0}
        told = served.ask(COMPLETION, prediction=prediction, **asked)
        assert told["choices"][0]["text"] == text
        count = "accepted" if is_right else "rejected"
        assert told["usage"]["completion_tokens_details"][f"{count}_prediction_tokens"] > 0


def test_what_was_read_is_counted(served: Served) -> None:
    """The first of several answers reads the prompt, and later requests only what is new."""

    def counted() -> tuple[int, int]:
        found, names = metrics(served), ("read", "kept")
        read, kept = (int(found[f"selfspec_prompt_tokens_{name}_total"]) for name in names)
        assert int(found["selfspec_kept_kv_bytes"]) > 0
        return read, kept

    text = "a text of which nobody has asked before, and which is long enough"
    asked = {"prompt_cache_key": "key", "prompt_cache_retention": "24h", "max_tokens": 3}
    usages, messages = [], [{"role": "user", "content": text}]
    for n in (3, 1):
        told = served.ask(CHAT, messages=messages, n=n, temperature=0, **asked)
        usages.append(told["usage"])
    num_tokens = usages[0]["prompt_tokens"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, num_tokens]
    before = counted()
    messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "what?"}]
    usage = served.ask(CHAT, messages=messages, temperature=0, **asked)["usage"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    assert num_tokens <= cached_tokens < usage["prompt_tokens"]
    read = usage["prompt_tokens"] - cached_tokens
    assert counted() == (before[0] + read, before[1] + cached_tokens)


def test_the_routes_that_are_meant_and_no_others(served: Served) -> None:
    get = served.client.get
    listed = get("/v1/models").json()
    assert [each["id"] for each in listed["data"]] == [NAME]
    assert get(f"/v1/models/{NAME}").json() == listed["data"][0]
    assert get("/v1/models/other/one").status_code == 404
    for route in ("/", "/docs", "/openapi.json", "/load_model", f"{CHAT}/more"):
        for response in (get(route), served.client.post(route, json={"model": "/etc"})):
            assert response.status_code in (404, 405), route
            assert response.json()["error"]["code"] == "no_such_route"
    response = get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


def test_statistics_and_metrics(served: Served) -> None:
    """Every line of metrics is a name, labels in quotation marks, and a number."""
    served.ask(COMPLETION, prompt="the quick brown fox the quick", max_tokens=24, temperature=0)
    stats = served.client.get("/selfspec/stats").json()
    assert stats["server"]["num_running"] == stats["server"]["num_waiting"] == 0
    lines = served.client.get("/metrics").text.splitlines()
    form = re.compile(r'[a-z_:]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+')
    assert all(map(form.fullmatch, lines)), lines
    found = metrics(served)
    assert 'selfspec_requests_total{route="/v1/completions",status="200"}' in found
    for name in ("requests_cancelled_total", "num_waiting", "num_running", "kv_bytes"):
        assert found[f"selfspec_{name}"] == "0"
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert int(found[f"selfspec_{name}_total"]) == stats[f"num_{name}"] > 0, name
    assert float(found["selfspec_tokens_per_step"]) > 1


def test_a_fault_of_the_server_is_counted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(type(served.translator), "arguments_for", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        served.post(COMPLETION, {"prompt": "def"})
    name = 'selfspec_requests_total{route="/v1/completions",status="500"}'
    assert metrics(served)[name] == "1"


@pytest.mark.parametrize("stop", [None, "never there"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_reply_decodes_each_token_once(
    served: Served, monkeypatch: pytest.MonkeyPatch, stop: Any, streams: bool
) -> None:
    """Also where a stop string is looked for, which the model's thread does."""
    decoded, add = list[int](), TextStream.add

    def noted(self: TextStream, *ids: int) -> str:
        decoded.extend(ids)
        return add(self, *ids)

    monkeypatch.setattr(TextStream, "add", noted)
    body = {"prompt": "a lazy dog", "max_tokens": 20, "temperature": 0, "stop": stop}
    assert served.post(COMPLETION, {**body, "stream": streams}).status_code == 200
    assert len(decoded) == 20

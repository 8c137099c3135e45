"""Files of prompts: each line is understood, or refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.batch import Answer
from selfspec.serving.batch_file import record
from selfspec.serving.prompt_files import read_line, read_prompts
from selfspec.serving.schema import RequestError
from selfspec.stats import GenerationStats
from tests.strategies import any_json, damaged

MESSAGES = [{"role": "user", "content": "ab"}]
SYSTEM = [{"role": "system", "content": "x"}]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LINES: tuple[dict[str, Any], ...] = (
    {"id": "a", "prompt": "x", "max_new_tokens": 4},
    {"messages": MESSAGES, "temperature": 0.5, "top_p": 1.0, "stop": ["."], "seed": 1},
    {"custom_id": "c", "body": {"messages": MESSAGES, "max_tokens": 3, "user": "me"}},
    {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
)
LENGTH = {"max_new_tokens": 3}


@pytest.mark.parametrize(
    ("line", "prompt", "arguments"),
    [
        ({"prompt": "x", "n": "mine", "model": 7}, "x", {}),
        ({"messages": [{"role": "user", "content": PARTS}]}, MESSAGES, {}),
        ({"messages": MESSAGES, "max_completion_tokens": 3}, MESSAGES, LENGTH),
        ({"prompt": "x", "max_tokens": 3, "max_new_tokens": 3}, "x", LENGTH),
        ({"body": {"prompt": [5, 6], "temperature": 0}}, [5, 6], {"do_sample": False}),
        ({"messages": [{"role": "developer", "content": "x"}]}, SYSTEM, {}),
        ({"prompt": "x", "stop": "."}, "x", {"stop_strings": ["."]}),
        ({"prompt": "x", "logit_bias": {"7": -100}}, "x", {"sequence_bias": {(7,): -100}}),
    ],
)
def test_one_dialect(line: dict[str, Any], prompt: Any, arguments: dict[str, Any]) -> None:
    read = read_line(1, json.dumps(line).encode())
    assert read.prompt == prompt
    assert read.settings.arguments() == arguments
    assert read.checksum == read_line(2, b" " + json.dumps(line).encode() + b"\r\n").checksum


def test_a_benchmark_file(tmp_path: Path) -> None:
    """As Spec-Bench has them, here with the mark that some editors begin a file with."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LINES[3]).encode() + b"\r\n\r\n")
    (line,) = read_prompts(path, "--prompts")
    assert line.turns == ("one", "two")
    assert line.prompt_for(SimpleNamespace(chat_template=None)) == "one"
    asked = line.prompt_for(SimpleNamespace(chat_template="a template"))
    assert asked == [{"role": "user", "content": "one"}]


def test_a_file_is_refused_by_its_first_wrong_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for data, said in (
        ('{"prompt": "x"}\n\n{"text": "x"}', "--prompts, line 3: a line must have one of prompt"),
        ("\n", "--prompts must have a prompt at least"),
    ):
        path.write_text(data)
        with pytest.raises(RequestError, match=said):
            read_prompts(path, "--prompts")
    with pytest.raises(RequestError, match="--prompts must be a file"):
        read_prompts(tmp_path, "--prompts")


WRONG = {
    '{"a": ' * 100_000: "a line must be JSON",
    "[1]": "a line must be a JSON object (got a list)",
    '{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}': "must have one of prompt, ",
    '{"prompt": ""}': "prompt must have at least 1 character (got '')",
    '{"prompt": "\\ud800"}': "prompt must be a valid string",
    '{"id": [1], "prompt": "x"}': "id must be text or a whole number (got [1])",
    '{"id": "\\ud800", "prompt": "x"}': "id must be whole characters",
    '{"messages": "hello"}': "messages must be a valid list (got 'hello')",
    '{"messages": [{"role": "nobody", "content": "x"}]}': "messages[0].role must be 'system'",
    '{"prompt": "x", "stop": "\\ud800"}': "stop[0] must be a valid string",
    '{"prompt": "x", "temperature": "hot"}': "temperature must be a valid number (got 'hot')",
    '{"prompt": "x", "seed": 1e70}': "seed must be a valid integer",
    '{"prompt": "x", "temprature": 0}': "'temprature'; did you mean 'temperature'?",
    '{"prompt": "x", "max_tokens": 3, "max_new_tokens": 4}': "max_tokens and max_new_tokens must",
    '{"body": {"prompt": "x", "n": 2}}': "n must ask for one answer",
}


def test_a_wrong_line_is_told_by_its_field() -> None:
    for line, said in WRONG.items():
        with pytest.raises(RequestError) as caught:
            read_line(1, line.encode())
        assert said in str(caught.value)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_lines_that_changed(data: st.DataObject) -> None:
    """What is understood can be answered, and the answer be written."""
    line: dict[str, Any] = json.loads(json.dumps(data.draw(st.sampled_from(LINES))))
    inside = line["body"] if "body" in line and data.draw(st.booleans()) else line
    inside[data.draw(st.sampled_from([*inside, "body", "prompt", "turns"]))] = data.draw(any_json)
    changed = json.dumps(line).encode()
    given = data.draw(st.just(changed) | damaged(changed) | st.binary(max_size=60))
    try:
        read = read_line(1, given)
    except RequestError as error:
        json.loads(json.dumps({"error": str(error)}))
    else:
        answer = Answer(0, "text", [1], "stop", 2, GenerationStats())
        json.loads(record(read, answer, "model").encode())

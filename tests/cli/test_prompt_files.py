"""Files of prompts: each line is understood, or refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.batch import Answer
from selfspec.cli.batch_file import record
from selfspec.cli.prompt_files import read_line, read_prompts
from selfspec.serving.fields import RequestError
from selfspec.serving.replies import Piece
from selfspec.stats import GenerationStats
from tests.strategies import any_json, damaged

MESSAGES = [{"role": "user", "content": "ab"}]
SYSTEM = [{"role": "system", "content": "x"}]
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LINES: tuple[dict[str, Any], ...] = (
    {"id": "a", "prompt": "x", "max_new_tokens": 4},
    {"messages": MESSAGES, "temperature": 0.5, "top_p": 1.0, "stop": ["."], "seed": 1},
    {"custom_id": "c", "body": {"messages": MESSAGES, "max_tokens": 3, "user": "me"}},
)
LENGTH = {"max_new_tokens": 3}


@pytest.mark.parametrize(
    ("line", "prompt", "arguments"),
    [
        ({"prompt": "x", "n": "mine", "model": 7}, "x", {}),
        ({"messages": [{"role": "user", "content": PARTS}]}, MESSAGES, {}),
        ({"messages": MESSAGES, "max_completion_tokens": 3}, MESSAGES, LENGTH),
        ({"prompt": "x", "max_tokens": 3, "max_new_tokens": 4}, "x", LENGTH),
        ({"body": {"prompt": [5, 6], "temperature": 0}}, [5, 6], {"do_sample": False}),
        ({"messages": [{"role": "developer", "content": "x"}]}, SYSTEM, {}),
        (
            {"body": {"prompt": "x", "logprobs": 2, "echo": True, "max_tokens": 1}},
            "x",
            {"max_new_tokens": 1, "logprobs": 2, "prompt_logprobs": 2},
        ),
        ({"prompt": "x", "logit_bias": {"7": -100}}, "x", {"sequence_bias": {(7,): -100}}),
    ],
)
def test_one_dialect(line: dict[str, Any], prompt: Any, arguments: dict[str, Any]) -> None:
    read = read_line(1, json.dumps(line).encode())
    assert read.prompt == prompt
    assert read.settings.arguments() == arguments
    assert read.checksum == read_line(2, b" " + json.dumps(line).encode() + b"\r\n").checksum


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"prompt": "x"}\n\n{"text": "x"}', "--prompts, line 3"),
        ("\n", "--prompts must have a prompt"),
        (None, "--prompts must be a file"),
    ],
)
def test_a_file_is_refused_by_its_first_wrong_line(
    tmp_path: Path, data: str | None, said: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.mkdir() if data is None else path.write_text(data)
    with pytest.raises(RequestError, match=said):
        read_prompts(path, "--prompts")


WRONG = {
    '{"a": ' * 100_000: "JSON",
    "[1]": "(got a list)",
    '{"question_id": 81, "turns": ["one", "two"]}': "body (got question_id, turns)",
    '{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}': "one of prompt",
    '{"prompt": ""}': "prompt",
    '{"prompt": "\\ud800"}': "JSON",
    '{"id": [1], "prompt": "x"}': "id",
    '{"messages": "hello"}': "messages",
    '{"messages": [{"role": "nobody", "content": "x"}]}': "messages[0].role",
    '{"prompt": "x", "stop": 7}': "stop: Input should be a valid string, or ",
    '{"prompt": "x", "temperature": "hot"}': "temperature",
    '{"prompt": "x", "seed": 1e70}': "seed",
    '{"prompt": "x", "temprature": 0}': "'temperature'?",
    '{"body": {"prompt": "x", "n": 2}}': "n must",
}


@pytest.mark.parametrize("line", WRONG, ids=range(len(WRONG)))
def test_a_wrong_line_is_told_by_its_field(line: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_line(1, line.encode())
    assert WRONG[line] in str(caught.value)


@settings(max_examples=200)
@given(st.data())
def test_lines_that_changed(data: st.DataObject) -> None:
    """What is understood can be answered, and the answer be written."""
    line: dict[str, Any] = json.loads(json.dumps(data.draw(st.sampled_from(LINES))))
    inside = line["body"] if "body" in line and data.draw(st.booleans()) else line
    inside[data.draw(st.sampled_from([*inside, "body", "prompt"]))] = data.draw(any_json)
    changed = json.dumps(line).encode()
    given = data.draw(st.just(changed) | damaged(changed) | st.binary(max_size=60))
    try:
        read = read_line(1, given)
    except RequestError as error:
        json.loads(json.dumps({"error": str(error)}))
    else:
        answer = Answer(0, "text", [1], "stop", 2, GenerationStats())
        json.loads(record(read, answer, [Piece(0, "text", "stop")], "model").encode())


def test_a_file_in_utf_16_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """As PowerShell on Windows writes it. UTF-8 with a mark at its start is read."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n', encoding="utf-16")
    with pytest.raises(RequestError, match=r"which is UTF-16\); save it as UTF-8"):
        read_prompts(file, "INPUT")
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n\r\n')
    assert read_prompts(file, "INPUT")[0].prompt == "x"

"""Lines with anything in them: each is understood, or refused with one sentence."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.batch import Answer
from selfspec.cli.batch.batch_lines import read_line
from selfspec.errors import CliError
from selfspec.stats import GenerationStats
from tests.strategies import any_json, damaged

FUZZ = settings(max_examples=300, deadline=None)
MESSAGES = [{"role": "user", "content": "a"}]
LINES = (
    {"id": "a", "prompt": "x", "max_new_tokens": 4},
    {"messages": MESSAGES, "temperature": 0.5, "top_p": 1.0, "stop": ["."], "seed": 1},
    {"custom_id": "c", "body": {"messages": MESSAGES, "max_tokens": 3, "user": "me"}},
)


def tried(data: bytes) -> None:
    """What is understood can be answered, and the answer be written."""
    try:
        line = read_line(1, data)
    except CliError as error:
        json.loads(json.dumps({"error": str(error)}))
        return
    answer = Answer(0, "text", [1], "stop", 2, GenerationStats())
    json.loads(line.answered(answer, "model").encode())


@FUZZ
@given(st.binary(max_size=60) | any_json.map(lambda value: json.dumps(value).encode()))
def test_anything(data):
    tried(data)


@FUZZ
@given(st.data())
def test_lines_that_changed(data):
    line: dict[str, Any] = json.loads(json.dumps(data.draw(st.sampled_from(LINES))))
    inside = line["body"] if "body" in line and data.draw(st.booleans()) else line
    inside[data.draw(st.sampled_from([*inside, "body", "prompt", "turns"]))] = data.draw(any_json)
    tried(json.dumps(line).encode())


@FUZZ
@given(st.data())
def test_bytes_that_changed(data):
    tried(data.draw(damaged(json.dumps(data.draw(st.sampled_from(LINES))).encode())))

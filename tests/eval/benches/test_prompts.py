"""The measuring set, and lines of a questions file that are none."""

from __future__ import annotations

import json

import pytest

from eval.benches.prompts import measuring_set
from eval.benches.questions import read_questions
from tests.tiny import make_tokenizer


@pytest.fixture
def tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    return tokenizer


def test_the_measuring_set_is_every_tenth_question_of_each_task(questions, tokenizer):
    chosen = measuring_set(tokenizer, read_questions(questions))
    assert [question.id for question, _ in chosen] == [0, 10, 100, 110, 200, 210]
    assert {question.task for question, _ in chosen} == {"multi-turn", "qa", "translation"}
    assert len(measuring_set(tokenizer, read_questions(questions), every=1)) == 36
    others = measuring_set(tokenizer, read_questions(questions), offset=5)
    assert [question.id for question, _ in others] == [5, 105, 205]


def test_a_long_prompt_is_left_out(tmp_path, tokenizer):
    path = tmp_path / "question.jsonl"
    entry = {"question_id": 1, "category": "qa", "turns": ["word " * 2000]}
    path.write_text(json.dumps(entry) + "\n")
    assert measuring_set(tokenizer, read_questions(path)) == []

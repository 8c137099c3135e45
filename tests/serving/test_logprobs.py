"""Log probabilities, as clients of OpenAI ask for them: the model's own, with drafts as without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from openai import OpenAI

from tests.serving.conftest import COMPLETION, MESSAGES, NAME, Served
from tests.serving.test_schemas import WEATHER
from tests.sessions import alone

PROMPT = "the quick brown fox jumps over the lazy dog"


def logprobs_of(served: Served, ids: list[int]) -> torch.Tensor:
    """(L, V): what a plain forward says of the token after each."""
    with torch.no_grad():
        return served.model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}])
def test_a_chat_whole_and_streamed(client: OpenAI, served: Served, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "max_tokens": 16,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"70": 5},
        **options,
    }
    (whole,) = client.chat.completions.create(**asked).choices
    content = whole.logprobs.content
    chunks = [each.choices[0] for each in client.chat.completions.create(stream=True, **asked)]
    assert [each.delta.role for each in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    parts = [part for each in chunks if each.logprobs for part in each.logprobs.content]
    assert [(each.token, each.logprob) for each in parts] == [
        (each.token, pytest.approx(each.logprob, abs=1e-4)) for each in content
    ]
    assert len(content) == 16
    texts = ("\ufffd" if each.bytes is None else bytes(each.bytes).decode() for each in content)
    assert list(texts) == [each.token for each in content]
    for each in content:
        found = [top.logprob for top in each.top_logprobs]
        assert len(found) == 3
        assert found == sorted(found, reverse=True)
        assert each.logprob <= found[0] + 1e-4
    plain = client.chat.completions.create(**{**asked, "logprobs": False, "top_logprobs": 0})
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].message.content == whole.message.content


def test_a_completion_has_those_of_a_plain_forward(served: Served) -> None:
    ids = served.tokenizer(PROMPT)["input_ids"]
    asked = {"prompt": ids, "max_tokens": 12, "temperature": 0, "logprobs": 2, "echo": True}
    before = served.spec.total_stats.num_accepted_tokens
    for _ in range(3):
        (choice,) = served.ask(COMPLETION, **asked)["choices"]
    assert served.spec.total_stats.num_accepted_tokens > before
    (line,) = served.choices_in_file(asked)
    scores = choice["logprobs"]
    assert line["logprobs"]["tokens"] == scores["tokens"]
    assert line["text"] == choice["text"]
    assert choice["text"].startswith(PROMPT)
    assert len(scores["tokens"]) == len(ids) + 12
    written = ids + alone(served.model, ids, 0, max_new_tokens=12)
    assert scores["tokens"] == [served.tokenizer.decode([token]) for token in written]
    expected = logprobs_of(served, written)
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    for place in range(1, len(written)):
        own = expected[place - 1, written[place]].item()
        assert scores["token_logprobs"][place] == pytest.approx(own, abs=1e-4)
        best = expected[place - 1].max().item()
        assert max(scores["top_logprobs"][place].values()) == pytest.approx(best, abs=1e-4)
    text = "".join(scores["tokens"][: len(ids)])
    assert text == PROMPT
    # Evaluations of multiple choice ask for the token's own score alone.
    several = {**asked, "prompt": [ids, PROMPT], "max_tokens": 1, "logprobs": 0}
    for each in served.ask(COMPLETION, **several)["choices"]:
        own_scores = each["logprobs"]["token_logprobs"][1 : len(ids)]
        assert own_scores == pytest.approx(scores["token_logprobs"][1 : len(ids)], abs=1e-4)


def test_a_grammar_that_leaves_one_token_changes_no_score(client: OpenAI) -> None:
    """They are those before the grammar: what it forces may be as good as impossible."""
    pytest.importorskip("llguidance", reason="needs the extra: pip install '.[grammar]'")
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 0}
    asked |= {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 180}
    asked["parallel_tool_calls"] = False
    (told,) = client.chat.completions.create(logprobs=True, top_logprobs=20, **asked).choices
    assert told.finish_reason == "tool_calls"
    scores = told.logprobs.content
    assert all(math.isfinite(each.logprob) for each in scores)
    assert any(each.logprob < each.top_logprobs[-1].logprob for each in scores)

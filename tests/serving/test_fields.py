"""What a request may ask for beside the common fields: the text is that of a plain loop."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import LogitsProcessorList

from selfspec import SelfSpec, attach
from selfspec.errors import ConfigError
from tests.fakes import WildSource, tiny_model
from tests.serving.conftest import CHAT, COMPLETION, MESSAGES, NAME, Served

PROMPT = "the quick brown fox"
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}


def text_of(served: Served, **body: Any) -> str:
    return served.ask(COMPLETION, **{**ASKED, **body})["choices"][0]["text"]


def penalized(
    ids: torch.Tensor, scores: torch.Tensor, num_prompt: int, presence: float, frequency: float
) -> torch.Tensor:
    """Token after token, as OpenAI's page has it."""
    scores, answer = scores.clone(), ids[0, num_prompt:].tolist()
    for token in set(answer):
        scores[0, token] -= answer.count(token) * frequency + presence
    return scores


PENALTIES = [(2.0, 1.5), (-1.0, 0.7)]


@pytest.mark.parametrize(("presence", "frequency"), PENALTIES)
def test_penalties_are_those_of_a_plain_loop(
    client: OpenAI, served: Served, presence: float, frequency: float
) -> None:
    """Greedy and sampled, with drafts of the same text before."""
    ids = served.tokenizer(PROMPT)["input_ids"]
    processors = LogitsProcessorList(
        [lambda given, scores: penalized(given, scores, len(ids), presence, frequency)]
    )
    fields: dict[str, Any] = {"presence_penalty": presence, "frequency_penalty": frequency}
    for seed, options in ((0, {}), (5, {"do_sample": True, "temperature": 0.8})):
        expected = served.text_alone(
            ids, seed, max_new_tokens=30, logits_processor=processors, **options
        )
        asked = {"temperature": options.get("temperature", 0), "seed": seed, **fields}
        for _ in range(2):
            assert text_of(served, **asked) == expected
        given = {"model": NAME, **ASKED, **asked}
        assert client.completions.create(**given).choices[0].text == expected
    assert text_of(served, **fields) != text_of(served)


def test_a_limit_of_drafts_for_one_call() -> None:
    model = attach(tiny_model(), SelfSpec(extra_sources=[WildSource()], budget="fixed"))
    spec = SelfSpec(extra_sources=[WildSource()], budget="fixed", max_nodes=8)
    asked: dict[str, Any] = {"inputs": torch.tensor([[5, 6, 7]]), "max_new_tokens": 12}
    expected = model.generate(assistant=None, **asked)
    for most in (1, 3, 8):
        assert torch.equal(model.generate(assistant=spec, max_nodes=most, **asked), expected)
        num_nodes, num_steps = spec.stats.num_nodes, spec.stats.num_steps
        assert num_steps <= num_nodes <= most * num_steps
        assert (num_nodes > num_steps) == (most > 1)
    for wrong in (0, 10**9, True, "4"):
        with pytest.raises(ConfigError, match="max_nodes must be"):
            model.generate(assistant=spec, max_nodes=wrong, **asked)


def test_names_of_vllm(served: Served) -> None:
    ids = served.tokenizer(PROMPT)["input_ids"]
    ends = {"logit_bias": {"1": 100}}  # The end token.
    (ended,) = served.ask(COMPLETION, **ASKED, **ends)["choices"]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    assert text_of(served, skip_special_tokens=False, **ends) == "<|eos|>"
    (gone_on,) = served.ask(COMPLETION, **ASKED, **ends, ignore_eos=True)["choices"]
    assert gone_on["finish_reason"] == "length"
    biased: dict[str, Any] = {"max_new_tokens": 30, "sequence_bias": {(1,): 100.0}}
    expected = served.text_alone(ids, min_new_tokens=7, **biased)
    assert expected
    assert text_of(served, min_tokens=7, **ends) == expected
    whole = text_of(served)
    part = next(whole[n : n + 2] for n in range(4, 40) if whole[n : n + 2].isalnum())
    assert text_of(served, stop=part) == whole[: whole.index(part)]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/responses"])
def test_all_that_becomes_tokens_is_limited(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, and before any of it is tokenized: the others would wait for that."""
    half = "x " * (512 * 8 // 2)
    function = {"name": "a", "description": half}
    fields: dict[str, Any] = {
        "tools": [function if path != CHAT else {"function": function}],
        "chat_template_kwargs": {"a": half},
        "prediction": {"type": "content", "content": half},
    }
    fields["tools"][0]["type"] = "function"
    prompt: Any = half if path != CHAT else [{"role": "user", "content": half}]
    body = {{CHAT: "messages", COMPLETION: "prompt"}.get(path, "input"): prompt}
    monkeypatch.setattr("selfspec.batch.prompts.inputs_of", None)
    for name in ("prediction", *(fields if path != COMPLETION else ())):
        error = served.post(path, {**body, name: fields[name]}).json()["error"]
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
        rule = "must fit into the model's 512 positions, with all other texts of the request"
        assert error["message"] == f"{name} {rule} (got more than 8192 characters)"


@pytest.mark.parametrize("temperature", [0, 1])
def test_processors_that_leave_no_choice(served: Served, temperature: float) -> None:
    schema = {"name": "seven", "schema": {"enum": [7]}}
    wrong = {"response_format": {"type": "json_schema", "json_schema": schema}, "min_tokens": 20}
    wrong["temperature"] = temperature
    response = served.post(COMPLETION, {**ASKED, **wrong})
    assert response.status_code == 400, response.text
    assert "can't keep to its schema any further: no token is allowed" in response.text


def test_how_a_prompt_becomes_tokens(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """The template's variables, and a last message that is gone on with."""

    def num_tokens(**body: Any) -> int:
        body = {"messages": MESSAGES, "max_tokens": 1, **body}
        return int(served.ask(CHAT, **body)["usage"]["prompt_tokens"])

    plain, template = num_tokens(), served.tokenizer.chat_template
    caplog.set_level("INFO", "selfspec")
    assert num_tokens(reasoning_effort="high") == plain
    assert "reasoning_effort: ignored" in caplog.text
    try:
        served.tokenizer.chat_template = template + "{{ reasoning_effort }}{{ mood }}"
        assert num_tokens(reasoning_effort="high") == plain + 4
        assert num_tokens(chat_template_kwargs={"mood": "good"}) == plain + 4
    finally:
        served.tokenizer.chat_template = template
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    gone_on = served.ask(
        CHAT, messages=begun, continue_final_message=True, max_tokens=9, temperature=0
    )
    ids = served.tokenizer.apply_chat_template(
        begun, continue_final_message=True, return_dict=False
    )
    assert gone_on["choices"][0]["message"]["content"] == served.text_alone(ids, max_new_tokens=9)
    for name in ("chat_template", "tokenize", "messages", "tools"):
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: "x"}}
        error = served.post(CHAT, body).json()["error"]
        assert error["param"] == "chat_template_kwargs"
        assert "must be variables of the template's own" in error["message"]


def test_version_health_and_a_slash_at_the_end(served: Served) -> None:
    assert served.client.get("/version").json() == {"version": version("selfspec")}
    assert served.client.head("/health").status_code == 200
    assert served.client.get("/v1/models/").json() == served.client.get("/v1/models").json()
    assert served.post(f"{CHAT}/", {"messages": MESSAGES, "max_tokens": 1}).status_code == 200

"""Prompts with images among many: each text is what `generate()` gives for that prompt alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec import UnsupportedError, generate_many
from selfspec.batch.prompts import inputs_of
from selfspec.compat.generation import KV
from tests.fakes import prompt, tiny_tokenizer
from tests.lossless.same import MODES
from tests.lossless.seeing import SEEING, prompt_with_image, seeing_model
from tests.sessions import alone, wild

FOLLOWED = [name for name in SEEING if name not in ("git", "mllama", "qwen3-5")]


def with_other_pixels(inputs: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same ids with another image."""
    return {**inputs, "pixel_values": inputs["pixel_values"] * factor}


@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")  # mllama's in 5.17
@pytest.mark.parametrize("mode", [pytest.param("greedy", marks=pytest.mark.slow), "sample"])
@pytest.mark.parametrize("name", SEEING)
def test_texts_are_those_of_each_prompt_alone(name: str, mode: str) -> None:
    """Among them the same ids with three images, which nothing that is kept may confuse."""
    model, seen, text = seeing_model(name), prompt_with_image(name, seed=2), prompt(1, 17, seed=3)
    given = [
        seen,
        with_other_pixels(seen, -1.0),
        text,
        with_other_pixels(seen, 0.3),
        prompt_with_image(name, seed=4),
        seen,
    ]
    options, spec = {"max_new_tokens": 10, "eos_token_id": [15, 26], **MODES[mode]}, wild()
    expected = [alone(model, inputs, 3 + i, **options) for i, inputs in enumerate(given)]
    assert len({tuple(expected[index]) for index in (0, 1, 3)}) > 1
    for _ in range(2):  # The second time, tables know all texts.
        answers = generate_many(
            model, tiny_tokenizer(), given, assistant=spec, max_rows=3, seed=3, **options
        )
        found = {answer.index: answer.ids for answer in answers}
        assert [found[index] for index in range(len(given))] == expected
    if name in FOLLOWED:
        assert spec.total_stats.disabled_reason is None
        assert spec.total_stats.num_nodes > spec.total_stats.num_steps


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_kv_cache_from_turn_to_turn(name: str) -> None:
    """Each prompt may bring its own, which is filled as `generate()` fills it."""
    model, tokenizer, first = seeing_model(name), tiny_tokenizer(), prompt_with_image(name)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}

    def ours(inputs: dict[str, Any]) -> list[int]:
        (answer,) = generate_many(model, tokenizer, [inputs], assistant=wild(), **options)
        return answer.ids

    def stock(inputs: dict[str, Any]) -> list[int]:
        return alone(model, inputs, 0, **options)

    def two_turns(answer: Any) -> tuple[list[int], int]:
        kv = DynamicCache(config=model.config.get_text_config())
        new = torch.tensor([answer({**first, KV: kv})])
        ids = torch.cat([first["input_ids"], new, prompt(seed=4)["input_ids"]], dim=1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids), KV: kv}
        for types in ("token_type_ids", "mm_token_type_ids"):
            if types in first:
                second[types] = torch.zeros_like(ids)
        return answer(second), kv.get_seq_length()

    assert two_turns(ours) == two_turns(stock)


def test_messages_with_images_and_all_that_needs_a_tokenizer() -> None:
    processors = pytest.importorskip("tests.processors")
    model, processor = processors.seeing_pair()
    content = [{"type": "image", "image": processors.picture()}, {"type": "text", "text": "fox"}]
    messages = [{"role": "user", "content": content}]
    inputs = inputs_of(messages, processor)
    assert isinstance(inputs, dict)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = alone(model, inputs, 0, **options)
    given = [messages, [{"role": "user", "content": "fox"}], "fox", inputs]
    answers = sorted(generate_many(model, processor, given, **options), key=lambda a: a.index)
    assert answers[0].ids == answers[3].ids == expected
    assert answers[0].text == processor.decode(expected, skip_special_tokens=True)
    assert len({answer.text for answer in answers}) == 3
    letters = re.findall("[a-z]{2}", answers[0].text)
    stop = {"stop_strings": letters[0], "prediction": answers[0].text}
    (stopped,) = generate_many(model, processor, [messages], **options, **stop)
    assert len(stopped.ids) < len(expected)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "got input_ids None"),
        ({"input_ids": [[1, 2]]}, "return_tensors='pt'"),
        (prompt(2), r"got input_ids of shape \(2, "),
        (
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[0, 1]])},
            "must have no padding",
        ),
    ],
)
def test_what_is_refused(inputs: Any, said: str) -> None:
    (answer,) = generate_many(
        seeing_model("llava"), tiny_tokenizer(), [inputs], max_new_tokens=2, do_sample=False
    )
    assert isinstance(answer.error, UnsupportedError)
    assert re.search(said, str(answer.error))


def test_tools_reach_a_processor_whose_template_knows_none() -> None:
    class Processor:
        tokenizer, chat_template = object(), "of messages alone"
        given: Any = None

        def apply_chat_template(self, messages: Any, *, tokenize: bool, **_: Any) -> Any:
            self.given = messages
            return {"input_ids": torch.ones(1, 2, dtype=torch.long)} if tokenize else "the same"

    processor = Processor()
    inputs_of([{"role": "user", "content": "hello"}], processor, [{"name": "look"}])
    system, user = processor.given
    assert "look" in system["content"][0]["text"]
    assert user["content"] == [{"type": "text", "text": "hello"}]

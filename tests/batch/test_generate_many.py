"""Many prompts over few rows: each text is what `generate()` gives for that prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from selfspec import (
    AttachError,
    ConfigError,
    SelfSpec,
    UnsupportedError,
    VocabularyError,
    attach,
    generate_many,
)
from selfspec.cost import Budget
from selfspec.engine import Engine
from selfspec.forward.prompt import Prefilled
from selfspec.prompt import Prompt
from selfspec.weights.streamed.memory_plan import kv_bytes
from tests.fakes import (
    PAD,
    VOCAB,
    WildSource,
    fake_trials,
    new_model,
    packs_here,
    tiny_model,
    tiny_tokenizer,
)
from tests.lossless.same import MODES, few
from tests.sessions import TextSession, alone, wild
from tests.streamed import load_tightly, saved_model

LENGTHS = (9, 3, 31, 1, 14)
EOS = [15, 26]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Random ids, one of them the pad token, which means nothing here."""
    dice = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, VOCAB, (length,), generator=dice).tolist() for length in lengths]
    ids[0][3] = PAD
    return ids


def assert_as_alone(model: Any, given: list[list[int]], spec: SelfSpec, **options: Any) -> None:
    answers = list(
        generate_many(model, tiny_tokenizer(), given, assistant=spec, max_rows=3, seed=3, **options)
    )
    assert sorted(answer.index for answer in answers) == list(range(len(given)))
    for answer in answers:
        expected = alone(model, given[answer.index], 3 + answer.index, **options)
        assert answer.ids == expected, f"prompt {answer.index}"
        assert answer.stats.num_new_tokens == len(expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", few(["llama", "mistral", "gemma3", "gpt2", "deepseek-v3"]))
def test_texts_are_those_of_each_prompt_alone(name: str, mode: str) -> None:
    spec, options = wild(), {"max_new_tokens": 10, "eos_token_id": EOS, **MODES[mode]}
    assert_as_alone(tiny_model(name), prompts(), spec, **options)
    assert spec.total_stats.num_calls == len(LENGTHS)
    assert spec.total_stats.disabled_reason is None
    assert spec.total_stats.num_nodes > spec.total_stats.num_steps


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's own
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_what_ends_with_the_generate_of_a_wrapper_is_refused() -> None:
    """Virtual tokens are there until its `generate()` returns."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapper = get_peft_model(new_model(), config).eval()
    with pytest.raises(UnsupportedError, match=r"prompt learning.*call generate\(\) for each"):
        list(generate_many(wrapper, tiny_tokenizer(), prompts(), max_new_tokens=2))


def test_a_draft_model_beside_many_prompts() -> None:
    spec = wild(draft_model=tiny_model("gpt2"))
    assert_as_alone(tiny_model(), prompts(LENGTHS[:4]), spec, do_sample=True, max_new_tokens=6)
    assert spec.total_stats.num_draft_forwards > 4


def test_each_answer_says_why_drafts_were_paused() -> None:
    class Counting(Budget):
        def paused(self, num_plain: int, num_steps: int) -> str | None:
            return f"{num_plain} of {num_steps} steps"

    spec = SelfSpec(extra_sources=[WildSource()], budget=Counting())
    many = generate_many(
        tiny_model(), tiny_tokenizer(), prompts(), assistant=spec, max_rows=3, max_new_tokens=12
    )
    for answer in many:
        stats = answer.stats
        assert stats.paused == f"{stats.num_plain_steps} of {stats.num_steps} steps"


@pytest.mark.skipif(not packs_here(), reason="this torch packs no weights")
def test_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_trials(monkeypatch)
    model = attach(new_model(), pack=True)
    spec = SelfSpec(extra_sources=[WildSource()], forward="auto")
    assert_as_alone(model, prompts(), spec, do_sample=True, max_new_tokens=6)
    assert spec.stats.forward == "packed"


def test_streamed_weights(tmp_path: Path) -> None:
    saved_model(tmp_path)
    spec, model = wild(), load_tightly(tmp_path)
    assert_as_alone(model, prompts(LENGTHS[:4]), spec, do_sample=True, max_new_tokens=6)
    assert spec.stats.forward == "streamed"


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(
        generate_many(
            tiny_model(), tiny_tokenizer(), prompts(), seed=0, do_sample=True, max_new_tokens=4
        )
    )
    assert torch.equal(before, torch.get_rng_state())


class LastFirst:
    """The wrong way round."""

    def turn(self, num_tokens: int) -> float:
        return -num_tokens


def test_memory_is_never_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_model("mistral"), prompts((20, 8, 12, 5, 20, 7, 9))
    limit = kv_bytes(model, 180)
    session = TextSession(
        model, tiny_tokenizer(), wild(), max_rows=6, max_memory=limit, scheduler=LastFirst()
    )
    taken, rows = [], []

    def note(self: Engine, prompt: Prompt, prefilled: Prefilled) -> None:
        join(self, prompt, prefilled)
        reading = kv_bytes(model, prefilled.input_ids.shape[1])
        held = session.kv.nbytes
        taken.append(held + reading + held // (2 * model.config.num_hidden_layers))
        rows.append(session.num_running)

    join = Engine._join
    monkeypatch.setattr(Engine, "_join", note)
    for index, ids in enumerate(given):
        session.submit(index, ids, None, {"max_new_tokens": 10 + index})
    answers = session.answers().values()
    assert max(taken) <= limit
    assert max(rows) > 1
    for answer in answers:
        expected = alone(model, given[answer.index], 0, max_new_tokens=10 + answer.index)
        assert answer.ids == expected
    with pytest.raises(UnsupportedError, match="126 tokens of max_memory"):
        session.submit(9, given[0], None, {"max_new_tokens": 110})
    with pytest.raises(UnsupportedError, match="the prompt into 21"):
        session.submit(9, given[0] + given[1], None, {"max_new_tokens": 2})


def test_an_iterator_that_breaks_loses_no_prompt() -> None:
    def breaking() -> Any:
        yield from prompts()
        raise OSError("the file is gone")

    answers: list[Any] = []
    with pytest.raises(OSError, match="the file is gone"):
        answers.extend(generate_many(tiny_model(), tiny_tokenizer(), breaking(), max_new_tokens=3))
    assert {answer.index for answer in answers} == set(range(len(prompts())))


def test_text_and_reasons_to_finish() -> None:
    model, tokenizer, text = tiny_model(), tiny_tokenizer(), "the cat sat on"
    ids = tokenizer(text)["input_ids"]
    expected = alone(model, ids, 0, max_new_tokens=5)
    (answer,) = generate_many(model, tokenizer, [text], max_new_tokens=5)
    assert answer.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert (answer.finish_reason, answer.num_prompt_tokens) == ("length", len(ids))
    (stopped,) = generate_many(model, tokenizer, [text], max_new_tokens=5, eos_token_id=expected[2])
    assert stopped.finish_reason == "stop"
    assert stopped.ids == expected[: expected.index(expected[2]) + 1]


def test_prompts_that_are_refused_are_answers_too() -> None:
    """However many there are; all that are taken ahead were once the last ones."""
    good, messages = prompts()[0], [{"role": "user", "content": "x"}]
    wrong: list[Any] = [7, messages, ["no", "ids"], {"a": 1}, [-1, 3], [5] * 40, [3, VOCAB]]
    given = [*[[]] * 300, good, *wrong, good]
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True}
    limits = {"max_rows": 2, "max_memory": 20_000}
    found = generate_many(
        tiny_model(), tiny_tokenizer(), given, assistant=wild(), seed=0, **limits, **options
    )
    answers = {answer.index: answer for answer in found}
    assert sorted(answers) == list(range(len(given)))
    for index in (300, len(given) - 1):
        assert answers.pop(index).ids == alone(tiny_model(), good, index, **options)
    assert all(isinstance(answer.error, ValueError) for answer in answers.values())
    assert {(each.text, each.finish_reason) for each in answers.values()} == {("", "error")}
    too_long, unknown = (answers[len(given) - n].error for n in (3, 2))
    assert "must fit" in str(too_long)
    assert isinstance(unknown, VocabularyError)
    assert f"ids of the model's {VOCAB} tokens (got {VOCAB})" in str(unknown)


REFUSED: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
    ("Hi", {}, UnsupportedError, "list of prompts"),
    (["the"], {"no_such_argument": 1}, ValueError, "no_such_argument"),
    (["the"], {"streamer": object()}, UnsupportedError, "streamer"),
    (["the"], {"past_key_values": 1}, UnsupportedError, "past_key_values"),
    (["the"], {"cache": 1}, UnsupportedError, "cache"),
    (["the"], {"num_beams": 2}, UnsupportedError, "beam search"),
    (["the"], {"num_return_sequences": 2, "do_sample": True}, UnsupportedError, "return_sequences"),
    (["the"], {"max_rows": 0}, ConfigError, "max_rows"),
    (["the"], {"max_memory": "much"}, ConfigError, "max_memory"),
    (["the"], {"max_memory": 10_000, "max_new_tokens": 5000}, UnsupportedError, "must fit"),
    (["the"], {"assistant": "you"}, AttachError, "assistant"),
)


@pytest.mark.parametrize(("given", "options", "error", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_for_all_prompts_is_raised_before_any_work(
    given: Any, options: dict[str, Any], error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "step", None)
    with pytest.raises(error, match=said):
        next(
            generate_many(tiny_model(), tiny_tokenizer(), given, **{"max_new_tokens": 2} | options)
        )

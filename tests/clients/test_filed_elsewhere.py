"""What users of transformers' own assisted decoding and prompt lookup have reported.

Each test does what a user did, through `assistant=`, and is named by what the user saw. Each text
must be that of a call without drafts. `tests/lossless` tries the same at length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from selfspec import SelfSpec
from tests.fakes import VOCAB, new_model, prompt, tiny_model
from tests.lossless.same import FIXED, NUM_COLUMNS, Both, attached, knowing, late_token, run
from tests.lossless.same import run_both as run_stock_and_ours
from tests.lossless.seeing import prompt_with_image, seeing_model

GREEDY = {"do_sample": False}


def run_both(model: Any, *args: Any, **options: Any) -> Both:
    """Asserts that a call drafts, and that text and random state are those without drafts."""
    with attached(model):
        return run_stock_and_ours(model, *args, entrance="assistant", **options)


def test_it_crashed_where_there_was_no_end_token() -> None:
    """The prompt's end is in it once before, so there is something to look up."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 7, 8]])
    spec = SelfSpec(sources=("context",), **FIXED)
    both = run_both(tiny_model(), {"input_ids": ids}, spec, eos_token_id=None, **GREEDY)
    assert both.stats.drafted_by_source["context"] > 0


@pytest.mark.parametrize("seed", range(6))
def test_sampled_texts_were_not_of_the_models_distribution(seed: int) -> None:
    """With top-k, and a draft model that says something else, which most of its guesses show."""
    spec = SelfSpec(draft_model=tiny_model("gemma3"), **FIXED)
    options = {"do_sample": True, "top_k": 20, "temperature": 1.3, "seed": seed}
    both = run_both(tiny_model(), prompt(), spec, **options)
    drafted, accepted = both.stats.drafted_by_source, both.stats.accepted_by_source
    assert accepted["draft model"] < drafted["draft model"]


def test_a_greedy_text_was_not_the_greedy_one() -> None:
    run_both(tiny_model(), prompt(), SelfSpec(draft_model=tiny_model("gemma3"), **FIXED), **GREEDY)


def test_a_batch_was_refused() -> None:
    """Three padded prompts, and two texts of each."""
    both = run_both(tiny_model(), prompt(3), do_sample=True, num_return_sequences=2)
    assert len(both.ours.ids) == 6


def test_a_prompt_with_an_image_failed() -> None:
    run_both(seeing_model("llava"), prompt_with_image("llava"), **GREEDY)


@pytest.mark.parametrize(("name", "draft"), [("gemma3", "mistral"), ("mistral", "gemma3")])
def test_it_broke_once_the_text_was_longer_than_the_window(name: str, draft: str) -> None:
    """The draft model has a window, too, and most of its guesses are taken back."""
    model, small = tiny_model(name), tiny_model(draft)
    assert max(each.config.sliding_window for each in (model, small)) < NUM_COLUMNS
    both = run_both(model, prompt(), SelfSpec(draft_model=small, **FIXED), **GREEDY)
    assert both.stats.num_draft_forwards > 0


class Told(BaseStreamer):  # type: ignore[misc]
    """Keeps the tokens that a reader would see."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """The text is over."""


def test_it_went_on_after_the_end_token() -> None:
    """The end is drafted, and so is what would come after it."""
    inputs = prompt()
    whole = run(tiny_model(), inputs, **GREEDY).ids
    end = late_token(whole[0, NUM_COLUMNS : NUM_COLUMNS + 12].tolist())
    options: dict[str, Any] = {"eos_token_id": end, "pad_token_id": 0, **GREEDY}
    spec, streamed = knowing(whole, inputs), lambda: {"streamer": Told()}
    both = run_both(tiny_model(), inputs, spec, fresh=streamed, **options)
    assert both.ours.ids[0, -1] == end
    assert both.our_extras["streamer"].tokens == both.ours.ids[0].tolist()
    assert both.stats.tokens_per_step > 2


@pytest.mark.parametrize("num_new", [1, 2, 5])
def test_it_wrote_more_tokens_than_asked_for(num_new: int) -> None:
    inputs = prompt()
    spec = knowing(run(tiny_model(), inputs, **GREEDY).ids, inputs)
    both = run_both(tiny_model(), inputs, spec, max_new_tokens=num_new, **GREEDY)
    assert both.ours.ids.shape[1] == NUM_COLUMNS + num_new


def test_forbidden_tokens_of_the_prompt_were_looked_up() -> None:
    inputs = prompt()
    forbidden = inputs["input_ids"][0].unique().tolist()
    spec = SelfSpec(sources=("context",), **FIXED)
    both = run_both(
        tiny_model(), inputs, spec, suppress_tokens=forbidden, max_new_tokens=60, **GREEDY
    )
    assert not set(forbidden) & set(both.ours.ids[0, NUM_COLUMNS:].tolist())


def test_a_penalty_did_not_see_the_tokens_of_the_same_step() -> None:
    inputs = prompt()
    penalty: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, **GREEDY}
    spec = knowing(run(tiny_model(), inputs, **penalty).ids, inputs)
    assert run_both(tiny_model(), inputs, spec, **penalty).stats.tokens_per_step > 2


@pytest.mark.parametrize("more", [40, -40])
def test_a_draft_model_of_the_family_with_other_padding_of_its_vocabulary_failed(more: int) -> None:
    spec = SelfSpec(draft_model=new_model("qwen2", vocab_size=VOCAB + more), **FIXED)
    both = run_both(tiny_model(), prompt(), spec, **GREEDY)
    assert both.stats.drafted_by_source["draft model"] > 0


def test_a_static_kv_cache_was_an_error() -> None:
    """It is no error here, and nothing is drafted; the statistics say why."""
    options = {"cache_implementation": "static", "drafts": False, **GREEDY}
    stats = run_both(tiny_model("llama", "eager"), prompt(), **options).stats
    assert "a KV cache of type Static" in str(stats.disabled_reason)

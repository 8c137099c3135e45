"""Logits processors: built-in, user-made, stateful, blind to rows or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, WatermarkingConfig

from tests.fakes import VOCAB, new_model, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    MODES,
    NUM_COLUMNS,
    ROUNDING,
    SAMPLE,
    Both,
    Call,
    knowing,
    run_both,
    slow,
)

OTHERS = ("mistral", "gemma3", "gpt2", "bloom", "deepseek-v3")


def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
    """What a row may say depends on which row it is, and on how far it has got."""
    return [t for t in range(1, VOCAB) if (t + batch_id + len(ids)) % 3]


# arguments of generate(); an end token is set where a rule is about it
RULES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_length": {"min_length": NUM_COLUMNS + 20, "eos_token_id": list(range(1, 30))},
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": list(range(1, 30))},
    "bad_words_ids": {"bad_words_ids": [[15], [38], [7, 9], [81, 2, 3]]},
    "forced_eos_token_id": {"forced_eos_token_id": 5, "max_new_tokens": 23},
    "suppress_tokens": {"suppress_tokens": list(range(10, 40))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(2, 90))},
    "sequence_bias": {"sequence_bias": [[[15], -4.0], [[38, 2], 5.0], [[7], 3.0]]},
    "renormalize_logits": {"renormalize_logits": True},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": [9]},
    "remove_invalid_values": {"remove_invalid_values": True},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "watermarking": {"watermarking_config": WatermarkingConfig()},
    "many": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
}
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.5, "top_k": 0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "top_h": {"top_h": 0.4},
    "everything": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["llama", *map(slow, OTHERS)])
def test_rules(name: str, rule: dict[str, Any], call: Call) -> None:
    run_both(tiny_model(name), call.inputs, drafts=name != "bloom", **call.options, **rule)


@pytest.mark.parametrize("num_rows", [slow(1), 3])
@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS)
def test_warpers(warpers: dict[str, Any], num_rows: int) -> None:
    run_both(tiny_model(), prompt(num_rows), do_sample=True, **warpers)


@pytest.fixture(scope="module")
def wordy_model() -> PreTrainedModel:
    """A vocabulary of the size of real ones, of which only parts are worked on at a time."""
    return new_model(vocab_size=151_936)


@pytest.mark.parametrize("num_rows", [slow(1), 3])
@pytest.mark.parametrize(
    "warpers",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        slow({"temperature": 0.1, "top_k": 0, "top_p": 0.9}),
        slow({"temperature": 0.2, "top_k": 0, "min_p": 0.3}),
        slow({"temperature": 0.3}),
        {"temperature": 0.3, "top_k": 0},
        slow({"temperature": 0.3, "top_k": 0, "typical_p": 0.5}),
        slow({"do_sample": False}),
    ],
    ids=str,
)
def test_a_real_vocabulary(
    wordy_model: PreTrainedModel, warpers: dict[str, Any], num_rows: int
) -> None:
    run_both(wordy_model, prompt(num_rows), **{"do_sample": True, "max_new_tokens": 24} | warpers)


class Recording(LogitsProcessor):
    """Notes what it was shown, and lets the scores depend on how often it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], list[int], tuple[int, ...]]] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append((tuple(input_ids.shape), input_ids[:, -1].tolist(), tuple(scores.shape)))
        self.scores.append(scores.clone())
        scores = scores.clone()
        scores[:, len(self.calls) % VOCAB] += 3.0
        return scores


def processed_by(
    make: Callable[[], LogitsProcessor], inputs: dict[str, Any], **options: Any
) -> tuple[Both, Any, Any]:
    """Stock and selfspec with a processor of their own each; both are returned too."""
    both = run_both(tiny_model(), inputs, fresh=lambda: {"logits_processor": [make()]}, **options)
    return both, *(x["logits_processor"][0] for x in (both.stock_extras, both.our_extras))


@pytest.mark.parametrize("eos", [None, list(range(1, 6))], ids=["endless", "ends"])
def test_stateful_processor_is_called_as_by_stock(eos: list[int] | None, call: Call) -> None:
    _, stock, ours = processed_by(Recording, call.inputs, eos_token_id=eos, **call.options)
    assert ours.calls == stock.calls
    assert torch.allclose(torch.stack(ours.scores), torch.stack(stock.scores), **ROUNDING)


class InPlacePacking(LogitsProcessor):
    """Scribbles into what it is given, as stock lets it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids[:, -1]] = -float("inf")
        return scores


class AcrossRows(LogitsProcessor):
    """Bans what other rows said last."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, input_ids[:, -1].unique(), -float("inf"))


class Float64(LogitsProcessor):
    """Answers in another dtype."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.double() * 1.1


@pytest.mark.parametrize("make", [InPlacePacking, AcrossRows, Float64])
def test_user_made_processors(make: Callable[[], LogitsProcessor], call: Call) -> None:
    processed_by(make, call.inputs, **call.options)


class RowWise(InPlacePacking):
    """Says that it looks at one row alone, which is the way to a pace of one's own."""

    is_row_wise = True

    def __init__(self) -> None:
        self.num_rows: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_rows.add(len(input_ids))
        return scores.scatter(1, input_ids[:, -1:], -float("inf"))


@pytest.mark.parametrize("mode", MODES)
def test_a_processor_may_say_that_it_looks_at_rows(mode: str) -> None:
    _, _, ours = processed_by(RowWise, prompt(3), **MODES[mode])
    assert ours.num_rows == {1}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_negative", [False, True], ids=["plain", "negative"])
def test_guidance(with_negative: bool, mode: str) -> None:
    """The guidance processor runs the model itself, on a KV cache of its own, at each call."""
    negative = prompt(1, 9, seed=3)["input_ids"] if with_negative else None
    run_both(
        tiny_model(), prompt(), guidance_scale=1.5, negative_prompt_ids=negative, **MODES[mode]
    )


@pytest.mark.parametrize("num_rows", [1, 3])
def test_processors_do_not_keep_right_drafts_out(num_rows: int) -> None:
    options = SAMPLE | {"repetition_penalty": 1.3, "min_new_tokens": 3}
    both = run_both(tiny_model(), prompt(num_rows), partial(knowing, max_nodes=8), **options)
    assert both.stats.num_steps == 3 * num_rows


def test_processors_of_a_plain_call() -> None:
    """A call that can't be drafted for hands its processors on."""
    options = {"drafts": False, "use_cache": False, **GREEDY}
    both, stock, ours = processed_by(Recording, prompt(), **options)
    assert both.stats.disabled_reason
    assert ours.calls == stock.calls

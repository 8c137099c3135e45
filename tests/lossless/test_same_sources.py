"""Whatever drafts, and however wrong, the text is stock's; right drafts are all taken."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from eval.papers.self_draft import Branches, ContextCache
from selfspec import SelfSpec
from selfspec.cache import CacheContents, TokenizerInfo
from selfspec.config import SOURCE_NAMES
from selfspec.draft.sources import REGISTRY
from tests.fakes import VOCAB, WildSource, prompt, tiny_model
from tests.grammars import KINDS, TOKENIZER, processors
from tests.lossless.same import (
    FIXED,
    GREEDY,
    MODES,
    NUM_NEW,
    Call,
    knowing,
    run_both,
    slow,
    texts_of,
)
from tests.tiny import make_model
from tests.zoo import BRANCHING

SETS: dict[str, tuple[str, ...]] = {
    "default": SelfSpec().config.sources,
    "none": (),
    **{name: (name,) for name in REGISTRY},
}


# drawn from so that a loaded cache's guesses are right often enough to be believed
TEXT_SETS: dict[str, dict[str, Any]] = {
    "alone": {"sources": ("answers",)},
    "all": {},
    "all with branches": {"shape": Branches(3), "extra_sources": [ContextCache()]},
    "left out": {"sources": tuple(s for s in SOURCE_NAMES if s != "answers")},
}


def knowing_texts(ids: torch.Tensor, inputs: dict[str, Any], **knobs: Any) -> SelfSpec:
    """A `SelfSpec` with a cache that has read the texts, with a lie at every third token."""
    read = [token for text in texts_of(ids, inputs) for token in text]
    lies = [token if place % 3 else (token + 1) % VOCAB for place, token in enumerate(read)]
    owner = TokenizerInfo("5a" * 32, "tiny", VOCAB)
    answers = np.array([*lies, -1, *read, -1, *lies, -1], np.int32)
    held = CacheContents(tokenizer=owner, answers=answers)
    return SelfSpec(contents=held, **knobs)


@pytest.mark.parametrize("sources", SETS.values(), ids=SETS)
def test_builtin_sources(sources: tuple[str, ...], call: Call) -> None:
    model, inputs = tiny_model(), call.inputs
    spec = SelfSpec(sources=sources, **FIXED)
    run_both(model, inputs, spec, drafts=False, **call.options)
    both = run_both(model, inputs, spec, drafts=bool(sources), **call.options)
    assert sources or both.stats.tokens_per_step == 1


@pytest.mark.parametrize("knobs", TEXT_SETS.values(), ids=TEXT_SETS)
@pytest.mark.parametrize("name", [name if name == "qwen3" else slow(name) for name in BRANCHING])
def test_texts_of_a_cache(name: str, knobs: dict[str, Any], call: Call) -> None:
    spec = partial(knowing_texts, **knobs)
    both = run_both(tiny_model(name), call.inputs, spec, **call.options)
    if name == "qwen3":
        asked = "answers" in knobs.get("sources", SOURCE_NAMES)
        assert (both.stats.accepted_by_source["answers"] > 12) is asked


@pytest.mark.parametrize("mode", MODES)
def test_what_was_learned_changes_no_later_text(mode: str) -> None:
    spec = SelfSpec()
    for seed in range(4):
        inputs = prompt(2, 9 + seed, seed=seed % 2)
        run_both(tiny_model("qwen2"), inputs, spec, seed=seed, drafts=False, **MODES[mode])


@pytest.mark.parametrize("width", [1, 3, VOCAB])
def test_wild_source(width: int, call: Call) -> None:
    spec = SelfSpec(sources=(), extra_sources=[WildSource(width=width)], **FIXED)
    run_both(tiny_model("mistral"), call.inputs, spec, **call.options)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "deepseek-v3"])
def test_a_source_that_knows_the_future_is_believed(name: str, call: Call) -> None:
    both = run_both(tiny_model(name), call.inputs, partial(knowing, max_nodes=8), **call.options)
    # the first token comes with the prompt's forward, the others eight by eight
    assert both.stats.num_steps == 3 * call.num_rows
    assert both.stats.tokens_per_step == (NUM_NEW - 1) / 3
    assert both.stats.num_new_tokens == NUM_NEW * call.num_rows


def test_chains_are_taken_whole_where_no_tree_fits() -> None:
    spec = partial(knowing, max_nodes=8)
    both = run_both(tiny_model("bloom"), prompt(), spec, drafts=False, **GREEDY)
    assert "chains" in str(both.stats.disabled_reason)
    assert both.stats.num_steps == 3


ALONE: dict[str, Any] = {"sources": ("answers",), **FIXED}


@pytest.mark.parametrize(("learning", "is_known"), [("session", True), ("request", False)])
def test_the_same_prompt_again(learning: str, is_known: bool, call: Call) -> None:
    """Random tokens never repeat themselves within a text."""
    spec = SelfSpec(learning=learning, **ALONE)
    first = run_both(tiny_model(), call.inputs, spec, drafts=False, **call.options)
    again = run_both(tiny_model(), call.inputs, spec, drafts=False, **call.options)
    assert again.stats.num_steps < first.stats.num_steps / 2 or not is_known
    assert again.stats.num_steps == first.stats.num_steps or is_known
    spec.forget()
    anew = run_both(tiny_model(), call.inputs, spec, drafts=False, **call.options)
    assert anew.stats.num_steps == first.stats.num_steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_grammar_of_the_callers(kind: str, call: Call) -> None:
    ids = torch.tensor([[5 + row, 40, 41, 42] for row in range(call.num_rows)])
    both = run_both(
        make_model(len(TOKENIZER)),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        SelfSpec(budget="fixed", max_nodes=12),
        fresh=lambda: {"logits_processor": processors(kind)},
        max_new_tokens=60,
        **call.options,
    )
    assert both.stats.accepted_by_source["grammar"] > 0

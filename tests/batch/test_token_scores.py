"""Log probabilities are those of a plain forward, however a text is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec import SelfSpec, UnsupportedError, generate_many
from tests.fakes import WildSource, tiny_model, tiny_tokenizer
from tests.lossless.same import slow

PROMPTS = [[5, 6, 7, 8, 9, 5, 6] * 40, [3, 4, 5], [7]]
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "processed": {"repetition_penalty": 1.3, "sequence_bias": {(9,): 4.0}},
    "plain": {"use_cache": False},
}

# Stock's plain steps of the tiny Qwen3-Next differ from its wide forward by 3.4e-4.
_ROUNDING = 5e-4


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *(("llama", choice) for choice in CHOICES),
        *((name, "sampled") for name in ("bloom", "qwen3-next")),
        *(slow(name, choice) for name in ("bloom", "qwen3-next") for choice in ("greedy", "plain")),
    ],
)
def test_scores_are_those_of_a_plain_forward(name: str, choice: str) -> None:
    """Of trees, of chains and without drafts; of prompts that are longer than a part, too."""
    model, options = tiny_model(name), {"max_new_tokens": 16, "seed": 1, **CHOICES[choice]}
    spec = SelfSpec(extra_sources=[WildSource()], budget="fixed", max_nodes=8)
    scored = {} if choice == "plain" else {"prompt_logprobs": 2}
    given = (model, tiny_tokenizer(), PROMPTS)
    plain = {each.index: each for each in generate_many(*given, assistant=spec, **options)}
    for answer in generate_many(*given, assistant=spec, logprobs=3, **scored, **options):
        assert answer.error is None
        assert answer.ids == plain[answer.index].ids
        assert plain[answer.index].logprobs is plain[answer.index].prompt_logprobs is None
        prompt = PROMPTS[answer.index]
        ids = torch.tensor([prompt + answer.ids])
        with torch.no_grad():
            expected = model(ids).logits[0].log_softmax(-1)
        scores = (answer.prompt_logprobs or [None] * len(prompt)) + (answer.logprobs or [])
        assert len(scores) == ids.shape[1]
        for place in range(1 if scored else len(prompt), len(scores)):
            token, text, logprob, top = scores[place]
            assert text == given[1].decode([token])
            assert token == ids[0, place]
            assert logprob == pytest.approx(expected[place - 1, token].item(), abs=_ROUNDING)
            values, tops = expected[place - 1].topk(2)
            assert [each.logprob for each in top[:2]] == pytest.approx(
                values.tolist(), abs=_ROUNDING
            )
            assert top[0].token == tops[0]
    if name == "llama" and choice != "plain":
        assert spec.total_stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("option", "said"),
    [({"prefill_chunk_size": 4}, "prefill_chunk_size is set"), ({"use_cache": False}, "use_cache")],
)
def test_what_can_not_be_scored(option: dict[str, Any], said: str) -> None:
    options = {"prompt_logprobs": 1, "max_new_tokens": 2, **option}
    with pytest.raises(UnsupportedError, match=said):
        list(generate_many(tiny_model(), tiny_tokenizer(), [[5]], **options))

"""The report on half precision: what counts as a difference, and how large it is."""

from __future__ import annotations

import json
import math

import pytest
import torch

from eval.benches.questions import Question
from eval.methods.sameness import Parting, parting
from eval.same_text import compare
from selfspec import SelfSpec
from tests.fakes import VOCAB, WildSource, new_model, prompt, tiny_model

PROMPTS = [(Question(n, "qa", ()), prompt(seed=n)["input_ids"]) for n in range(4)]


@pytest.mark.parametrize("ids", [[2, 0], [2, 0, 1, 1]])
def test_a_text_of_another_length_is_no_rounding(ids):
    found = parting([2, 0, 1], ids, lambda at: torch.zeros(3), torch.bfloat16)
    assert found == Parting(min(len(ids), 3), math.inf, math.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_by_near_ties_alone(dtype):
    spec = SelfSpec(extra_sources=[WildSource()])
    model = new_model(dtype=dtype)
    for text in compare(model, PROMPTS, spec, max_new_tokens=20):
        for found in text:
            assert found is None or abs(found.ulps) <= 4
    assert spec.total_stats.disabled_reason is None


def test_a_wrong_text_is_found():
    """A decoding loop that changes one token: its gap is stock's own."""

    def wrong(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        ids = type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )
        ids[0, input_ids.shape[1] + 3] = (ids[0, input_ids.shape[1] + 3] + 1) % VOCAB
        return ids

    for text in compare(tiny_model(), PROMPTS[:2], wrong, max_new_tokens=8):
        assert text.drafted is not None
        assert text.drafted.at == 3
        assert text.drafted.gap > 0
        assert text.batched is None


def test_the_command(asked, told):
    asked += ["--limit", "2", "--max-new-tokens", "8", "--dtypes", "float32", "bfloat16"]
    status, lines, _ = told("same_text", *asked)
    result = json.loads(lines[-1])
    assert status == 0
    assert list(result["dtypes"]) == ["float32", "bfloat16"]
    assert result["num_prompts"] == result["dtypes"]["float32"]["num_prompts"] == 2
    for name in ("selfspec", "stock_in_a_batch_of_two"):
        assert result["dtypes"]["float32"][name] == {"num_differ": 0, "share": 0.0}
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 2 * 2
    assert "| float32 | selfspec | 2 | 0 (0.0%) | – | – | – |" in table

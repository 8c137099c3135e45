"""The report on half precision: what counts as a difference, and how large it is."""

from __future__ import annotations

import json
import math

import pytest
import torch

from eval import same_text
from eval.benches.questions import Question
from eval.methods.sameness import Parting, parting
from eval.same_text import beside_a_longer_one, compare
from selfspec import SelfSpec
from tests.fakes import PAD, VOCAB, WildSource, new_model, prompt, tiny_model

PROMPTS = [(Question(n, "qa", ()), prompt(seed=n)["input_ids"]) for n in range(4)]


@pytest.mark.parametrize(
    ("dtype", "logits", "ulps"),
    [
        (torch.bfloat16, [20.5, 20.25], 2.0),  # from 16 to 32 an ulp of bf16 is 1/8
        (torch.bfloat16, [20.0, 20.125], 1.0),  # either may be larger
        (torch.float16, [20.5, 20.25], 16.0),
        (torch.float16, [1.0, 1.0 + 2**-10], 1.0),
        (torch.float32, [20.5, 20.25], 2.0**17),
        (torch.float32, [-8.0, -8.0], 0.0),
    ],
)
def test_a_gap_in_steps_of_the_dtype_at_the_larger_logit(dtype, logits, ulps):
    found = parting([2, 0, 1], [2, 1, 0], lambda at: torch.tensor(logits), dtype)
    assert found == Parting(1, abs(logits[0] - logits[1]), ulps)


@pytest.mark.parametrize("ids", [[2, 0], [2, 0, 1, 1]])
def test_a_text_of_another_length_is_no_rounding(ids):
    found = parting([2, 0, 1], ids, lambda at: torch.zeros(3), torch.bfloat16)
    assert found == Parting(min(len(ids), 3), math.inf, math.inf)


def test_the_prompt_is_padded_beside_a_longer_text():
    pair = beside_a_longer_one(torch.tensor([[*range(1, 11)]]), PAD)
    assert pair["input_ids"].tolist() == [
        [PAD] * 8 + [*range(1, 11)],
        [*range(1, 9), *range(1, 11)],
    ]
    assert pair["attention_mask"].tolist() == [[0] * 8 + [1] * 10, [1] * 18]
    assert beside_a_longer_one(torch.tensor([[5, 6]]), PAD)["input_ids"].shape == (2, 4)


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
    status, lines, _ = told(same_text, *asked)
    result = json.loads(lines[-1])
    assert status == 0
    assert list(result["dtypes"]) == ["float32", "bfloat16"]
    assert result["num_prompts"] == result["dtypes"]["float32"]["num_prompts"] == 2
    for name in ("selfspec", "stock_in_a_batch_of_two"):
        assert result["dtypes"]["float32"][name] == {"num_differ": 0, "share": 0.0}
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 2 * 2
    assert "| float32 | selfspec | 2 | 0 (0.0%) | – | – | – |" in table


def test_differences_are_summed_up():
    found = [Parting(3, 0.5, 1.0), None, Parting(8, 0.25, 2.0), Parting(10, 0.0, 0.0)]
    assert same_text._counted(found) == {
        "num_differ": 3,
        "share": 0.75,
        "median_at": 8,
        "largest_gap": 0.5,
        "median_ulps": 1.0,
        "largest_ulps": 2.0,
    }


def test_why_nothing_was_drafted_is_told(told, chat_folder, monkeypatch):
    monkeypatch.setattr(same_text, "load_asked", lambda *_: new_model("mamba", vocab_size=320))
    options = ["--model", chat_folder, "--text", "random", "--limit", "1", "--dtypes", "float32"]
    status, lines, _ = told(same_text, *options, "--max-new-tokens", "8")
    assert status == 0
    assert "disabled_reason" in json.loads(lines[-1])["dtypes"]["float32"]

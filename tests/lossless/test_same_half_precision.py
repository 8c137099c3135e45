"""In bf16 the text is stock's up to near-ties, which forwards of other widths round differently."""

from __future__ import annotations

import math

import pytest
import torch

from tests.fakes import new_model, prompt
from tests.lossless.same import GREEDY, NUM_COLUMNS, NUM_NEW, Outcome, doubting, run, slow

NUM_PROMPTS = 5
_MAX_ULPS = 4  # of bf16, between the tokens that two roundings of the whole model may choose from


def gap_at(logits: torch.Tensor, token: int) -> float:
    """How far stock's logits (V,) put a token behind the best one, in ulps of bf16."""
    best = float(logits.max())
    ulp = 2.0 ** (math.floor(math.log2(max(abs(best), 1e-30))) - 7)
    return (best - float(logits[token])) / ulp


def gaps_between(ours: torch.Tensor, stock: Outcome) -> list[float]:
    """For each row that differs from stock's: the gap where it does so first."""
    gaps = []
    for row, text in enumerate(ours):
        differs = (text != stock.ids[row]).nonzero()
        if len(differs):
            column = int(differs[0])
            logits = stock.output.logits[column - NUM_COLUMNS][row]
            gaps.append(gap_at(logits, int(text[column])))
    return gaps


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3", slow("qwen3-moe")])
def test_bf16(name: str, num_rows: int) -> None:
    model = new_model(name, dtype=torch.bfloat16)
    gaps = []
    for seed in range(NUM_PROMPTS):
        inputs = prompt(num_rows, seed=seed)
        stock = run(model, inputs, return_dict_in_generate=True, output_logits=True, **GREEDY)
        spec = doubting(stock.ids, inputs, seed=seed)
        ours = run(model, inputs, custom_generate=spec, **GREEDY).ids
        assert ours.shape == stock.ids.shape == (num_rows, NUM_COLUMNS + NUM_NEW)
        assert spec.stats.disabled_reason is None
        gaps += gaps_between(ours, stock)
    assert max(gaps, default=0.0) <= _MAX_ULPS

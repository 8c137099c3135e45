"""Llama 4 scales queries by blocks of KV columns: no tree may cross from one block to the next."""

from __future__ import annotations

import pytest
import torch

import selfspec
from tests.fakes import new_model, prompt


@pytest.mark.parametrize("num_rows", [1, 3])
def test_text_is_stocks_across_many_blocks(num_rows: int) -> None:
    model = new_model("llama4", floor_scale=11, attn_scale=2.0)
    spec = selfspec.SelfSpec(max_nodes=16)
    stock = model.generate(**prompt(num_rows), max_new_tokens=40)
    for _ in range(3):  # the later calls know the text and draft deep
        ours = model.generate(**prompt(num_rows), max_new_tokens=40, custom_generate=spec)
        assert torch.equal(ours, stock)
    assert spec.ability(model).mode == "tree"
    assert spec.stats.tokens_per_step > 1

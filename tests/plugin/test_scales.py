"""Llama 4 scales queries by blocks of KV columns: no tree may cross from one block to the next."""

from __future__ import annotations

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

import selfspec


@pytest.fixture(scope="module")
def model() -> Llama4ForCausalLM:
    torch.manual_seed(3)
    config = Llama4TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        initializer_range=0.4,
        attention_chunk_size=16,
        attn_temperature_tuning=True,
        floor_scale=11,
        attn_scale=2.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=96,
    )
    return Llama4ForCausalLM(config).eval()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_text_is_stocks_across_many_blocks(model: Llama4ForCausalLM, num_rows: int) -> None:
    ids = torch.randint(2, 90, (num_rows, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if num_rows > 1:
        mask[1, :3] = 0
    spec = selfspec.SelfSpec(max_nodes=16)
    stock = model.generate(ids, attention_mask=mask, max_new_tokens=40)
    for _ in range(3):  # the later calls know the text and draft deep
        ours = model.generate(ids, attention_mask=mask, max_new_tokens=40, custom_generate=spec)
        assert torch.equal(ours, stock)
    assert spec.ability(model).mode == "tree"
    assert spec.stats.tokens_per_step > 1

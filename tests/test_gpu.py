"""The core on a CUDA device: same text, same generator state, and trees in half precision too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import selfspec

pytestmark = pytest.mark.gpu


def tiny_llama(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to("cuda", dtype)


def prompts(num_rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 199, (num_rows, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "asked",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.2},
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    ],
    ids=["greedy", "penalty", "sample"],
)
def test_same_text_and_generator_state(num_rows: int, asked: dict[str, Any]) -> None:
    model = tiny_llama(torch.float32)
    spec = selfspec.SelfSpec()
    for _ in range(2):
        outputs, states = [], []
        for extra in ({}, {"custom_generate": spec}):
            torch.manual_seed(5)
            outputs.append(model.generate(**prompts(num_rows), max_new_tokens=48, **asked, **extra))
            states.append(torch.cuda.get_rng_state())
        assert torch.equal(*outputs)
        assert torch.equal(*states)
    assert spec.stats.disabled_reason is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tree_is_given_in_every_dtype(dtype: torch.dtype) -> None:
    assert selfspec.SelfSpec().ability(tiny_llama(dtype)).mode == "tree"


def test_ids_on_the_cpu_are_served() -> None:
    model = tiny_llama(torch.float32)
    inputs = {name: tensor.cpu() for name, tensor in prompts(3).items()}
    stock = model.generate(**inputs, max_new_tokens=20)
    ours = model.generate(**inputs, max_new_tokens=20, custom_generate=selfspec.SelfSpec())
    assert torch.equal(ours.cpu(), stock.cpu())

"""The core on a CUDA device: same text, same generator state, and trees in half precision too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from tests.fakes import new_model, prompt

pytestmark = pytest.mark.gpu


def on_gpu(dtype: torch.dtype) -> PreTrainedModel:
    return new_model(dtype=dtype).to("cuda")


def prompts(num_rows: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompt(num_rows).items()}


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
    model = on_gpu(torch.float32)
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
    assert selfspec.SelfSpec().ability(on_gpu(dtype)).mode == "tree"


def test_ids_on_the_cpu_are_served() -> None:
    model = on_gpu(torch.float32)
    inputs = prompt(3)
    stock = model.generate(**inputs, max_new_tokens=20)
    ours = model.generate(**inputs, max_new_tokens=20, custom_generate=selfspec.SelfSpec())
    assert torch.equal(ours.cpu(), stock.cpu())

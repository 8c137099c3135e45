"""On a trained chat model, where text is real: same text, and drafts that are worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec

PROMPTS = (
    "Write a short blog post about a trip to Hawaii.",
    "What is the capital of France, and why is it famous?",
    "A train travels 60 miles in 1.5 hours. What is its average speed?",
)
SAMPLE = {"do_sample": True, "temperature": 0.3, "top_k": 0}


@pytest.fixture(scope="module")
def model(chat_model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(chat_model_folder, dtype=torch.float32)


@pytest.mark.parametrize("asked", [{"do_sample": False}, SAMPLE], ids=["greedy", "sample"])
def test_same_text_in_fewer_steps(
    model: Any, chat_model_folder: Path, asked: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model_folder)
    spec = selfspec.SelfSpec()
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        texts = []
        for extra in ({}, {"custom_generate": spec}):
            torch.manual_seed(0)
            texts.append(model.generate(**inputs, max_new_tokens=96, **asked, **extra))
        assert torch.equal(*texts), prompt
    assert spec.total_stats.tokens_per_step > 1.5

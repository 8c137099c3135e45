"""The embedded tiny model before it has learned anything, and the optimizer that teaches it.

Knows tensors and transformers' configs; neither files nor the command line.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.models.tiny_corpus import EOS, PAD

MAX_POSITIONS = 2048


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers knows it; pads left, as generation needs."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: Tokenizer, *, seed: int, device: str) -> LlamaForCausalLM:
    """The untrained model, in bf16, with eos and pad in both of its configs."""
    ids = {"eos_token_id": tokenizer.token_to_id(EOS), "pad_token_id": tokenizer.token_to_id(PAD)}
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=688,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        # On a CPU two plain matmuls train faster than the fused kernel does.
        attn_implementation="eager" if device == "cpu" else "sdpa",
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


class MasterAdamW:
    """AdamW on fp32 copies of bf16 weights, which are then rounded from the copies.

    bf16 has 8 bits: a change of less than 1/256 of a weight would be lost in it, step after step.
    """

    def __init__(self, weights: Iterable[nn.Parameter], *, lr: float) -> None:
        self.weights = list(weights)
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.lr = lr
        groups = [
            {"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": 0.1},
            {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    def step(self, factor: float) -> None:
        """Take one step at `factor` times the full rate, and drop the gradients."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float() if weight.grad is not None else None
            weight.grad = None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.inner.param_groups:
            group["lr"] = self.lr * factor
        self.inner.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)

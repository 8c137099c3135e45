"""Random models with a running state and without, in the sizes of real ones: for their times."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.errors import EvalError
from selfspec import attach
from selfspec.errors import unknown_name

_TYPES = {"a": "full_attention", "c": "conv", "l": "linear_attention"}
# Without the parts that see pictures. `layer_types` has a letter of the above for each layer.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": "llla" * 6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 248_320,
    },
    "llama-0.8b": {  # Of the same sizes, with attention alone.
        "model_type": "llama",
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": "a" * 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 248_320,
    },
    "lfm2-700m": {
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "hidden_size": 1536,
        "intermediate_size": 10_240,
        "layer_types": "ccaccaccacacacac",
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 65_536,
    },
}


def random_model(
    name: str, num_layers: int | None, *, dtype: str, device: str, vocab_size: int | None = None
) -> Any:
    """A model of the named shape, with the first of its layers; None: with all."""
    if name not in SHAPES:
        raise EvalError(unknown_name("shape", name, SHAPES))
    shape = dict(SHAPES[name])
    types = [_TYPES[letter] for letter in shape["layer_types"][:num_layers]]
    shape |= {"layer_types": types, "num_hidden_layers": len(types)}
    shape |= {"vocab_size": vocab_size or shape["vocab_size"]}
    shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    config, kind = AutoConfig.for_model(**shape), getattr(torch, dtype)
    return attach(AutoModelForCausalLM.from_config(config, dtype=kind).eval().to(device))

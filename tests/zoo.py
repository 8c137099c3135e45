"""Configs of tiny models of many architectures: what the losslessness tests run on.

Weights are large enough that the text wanders: a text that repeats one token would let a wrong
draft pass unseen. Windows are shorter than the prompts and the outputs of the tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

VOCAB = 97
PAD = 0

NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
_WIDE = {"initializer_range": 0.3, "tie_word_embeddings": False, "vocab_size": VOCAB}
_DENSE = {
    **_WIDE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_FALCON = {name: value for name, value in _DENSE.items() if name != "head_dim"}
_GPT = {**_WIDE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_ROUTED = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
}
_CHUNKED = {
    "attention_chunk_size": 8,
    "attn_temperature_tuning": True,
    "floor_scale": 16,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
}
_SSM_HEADS = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_chunk_size": 8}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


class Architecture(NamedTuple):
    """How to make one tiny model."""

    model_type: str
    config: dict[str, Any]
    attentions: tuple[str, ...] = ("sdpa", "eager")


_EAGER = ("eager",)

BRANCHING = {
    "llama": Architecture("llama", _DENSE),
    "llama4": Architecture("llama4_text", _DENSE | _CHUNKED),
    "mistral": Architecture("mistral", _DENSE | {"sliding_window": 7}),
    "mixtral": Architecture("mixtral", _DENSE | _LOCAL_EXPERTS),
    "qwen2": Architecture("qwen2", _DENSE),
    "qwen3": Architecture("qwen3", _DENSE),
    "qwen3-moe": Architecture("qwen3_moe", _DENSE | _EXPERTS),
    "gemma2": Architecture(
        "gemma2", _DENSE | {"sliding_window": 6, "query_pre_attn_scalar": 8}, _EAGER
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _DENSE
        | {"sliding_window": 6, "query_pre_attn_scalar": 8}
        | {"num_hidden_layers": 3, "layer_types": _MIXED},
    ),
    "phi3": Architecture("phi3", _DENSE),
    "olmo2": Architecture("olmo2", _DENSE),
    "gpt2": Architecture("gpt2", _GPT | {"tie_word_embeddings": True}),
    "gptj": Architecture("gptj", _GPT | {"rotary_dim": 4}, _EAGER),
    "gpt-neox": Architecture("gpt_neox", _DENSE),
    "opt": Architecture(
        "opt", _DENSE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}
    ),
    "deepseek-v3": Architecture("deepseek_v3", _DENSE | _LATENT | _ROUTED),
    "gpt-oss": Architecture("gpt_oss", _DENSE | _LOCAL_EXPERTS | {"sliding_window": 6}, _EAGER),
    "falcon": Architecture("falcon", _FALCON | {"alibi": False}),
    "granite": Architecture("granite", _DENSE | {"logits_scaling": 2.0}),
    "cohere": Architecture("cohere", _DENSE),
    "starcoder2": Architecture("starcoder2", _DENSE | {"sliding_window": 9}),
    "stablelm": Architecture("stablelm", _DENSE),
    "glm4": Architecture("glm4", _DENSE),
}

# ALiBi, windows of the model's own making, recurrent and hybrid ones.
NOT_BRANCHING = {
    "falcon-alibi": Architecture("falcon", _FALCON | {"alibi": True}),
    "bloom": Architecture("bloom", _WIDE | {"hidden_size": 32, "n_layer": 2, "n_head": 4}, _EAGER),
    "mpt": Architecture(
        "mpt", _WIDE | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}, _EAGER
    ),
    "gpt-neo": Architecture(
        "gpt_neo",
        _WIDE
        | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 6},
        _EAGER,
    ),
    "mamba": Architecture(
        "mamba", _WIDE | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, _EAGER
    ),
    "jamba": Architecture(
        "jamba", _DENSE | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    ),
    "bamba": Architecture("bamba", _DENSE | _SSM_HEADS | {"attn_layer_indices": [1]}),
    "rwkv": Architecture(
        "rwkv", _WIDE | {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 512}, _EAGER
    ),
    "lfm2": Architecture("lfm2", _DENSE | {"layer_types": ["conv", "full_attention"]}),
    "qwen3-next": Architecture("qwen3_next", _DENSE | _EXPERTS | _DELTA_NET),
    "recurrent-gemma": Architecture(
        "recurrent_gemma",
        _DENSE | {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3},
    ),
}

ARCHITECTURES = BRANCHING | NOT_BRANCHING

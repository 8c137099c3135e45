"""Configs of tiny models of many architectures: what the losslessness tests run on.

Weights are large enough that the text wanders: a text that repeats one token would let a wrong
draft pass unseen. Windows are shorter than the prompts and the outputs of the tests. A family that
this transformers does not know is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from tools.census_families.shrink import small_config

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
_WITHOUT_HEAD_DIM = {name: value for name, value in _DENSE.items() if name != "head_dim"}
_WITHOUT_TIES = {name: value for name, value in _DENSE.items() if name != "tie_word_embeddings"}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
_DELTA_NET = {
    **_LINEAR,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}
_DELTA_ATTENTION = {  # Kimi's delta attention beside latent attention.
    **_LINEAR,
    **_LOCAL_EXPERTS,
    **{name: value for name, value in _LATENT.items() if name not in ("head_dim", "q_lora_rank")},
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
_INDEXED = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_budget": 8,  # Fewer columns than most texts have, so that it matters which.
    "indexer_compress_ratio": 2,
    "indexer_head_dim": 8,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 2,
}
_NGRAMS = {
    "eos_token_id": 96,  # No n-gram reaches beyond it.
    "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 2,
    "ngram_vocab_size_base": 50,
    "ple_layer_ids": [1],
    "split_ngram_parts": 1,
}
_RELATIVE = {
    "d_rel": 4,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "rel_extent": 32,
    "sliding_window_size": 6,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
}
_SSM_HEADS = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_chunk_size": 8}
_RECURRENT = {**_WIDE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    "mamba_d_state": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "use_mamba_kernels": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_COMPRESSED = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "hc_mult": 2,
    "head_dim": 16,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["moe", "moe"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
    "o_groups": 2,
    "o_lora_rank": 8,
    "q_lora_rank": 16,
    "sliding_window": 128,
}
_LOOPED = {name: value for name, value in _DENSE.items() if name != "initializer_range"} | {
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "n_input_layers": 2,
    "n_output_layers": 2,
    "num_hidden_layers": 8,
    "sliding_window": 6,
}


class Architecture(NamedTuple):
    """How to make one tiny model."""

    model_type: str
    config: dict[str, Any]
    attentions: tuple[str, ...] = ("sdpa", "eager")
    auto_class: Any = AutoModelForCausalLM


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
    "falcon": Architecture("falcon", _WITHOUT_HEAD_DIM | {"alibi": False}),
    "granite": Architecture("granite", _DENSE | {"logits_scaling": 2.0}),
    "cohere": Architecture("cohere", _DENSE),
    "starcoder2": Architecture("starcoder2", _DENSE | {"sliding_window": 9}),
    "stablelm": Architecture("stablelm", _DENSE),
    "glm4": Architecture("glm4", _DENSE),
}

# Their running states are in the KV cache, and their forwards over several tokens are right.
_ALL_HYBRID = {
    "bailing": Architecture(
        "bailing_hybrid",
        _DENSE | _DELTA_ATTENTION | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "bamba": Architecture("bamba", _DENSE | _SSM_HEADS | {"attn_layer_indices": [1]}),
    "falcon-h1": Architecture("falcon_h1", _DENSE | _SSM_HEADS | {"mamba_d_ssm": 64}),
    "granite-hybrid": Architecture(
        "granitemoehybrid",
        _DENSE | _SSM_HEADS | _LOCAL_EXPERTS | _LINEAR | {"shared_intermediate_size": 24},
    ),
    "inkling": Architecture("inkling_text", _WITHOUT_TIES | _RELATIVE),
    "kimi-linear": Architecture("kimi_linear", _WITHOUT_HEAD_DIM | _DELTA_ATTENTION),
    "lara-mini": Architecture(
        "lara_mini",
        _DENSE
        | _DELTA_NET
        | _EXPERTS
        | _SHARED_EXPERT
        | {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}
        | {"num_hidden_layers": 3, "sliding_window": 6},
    ),
    "lfm2": Architecture("lfm2", _DENSE | _CONV),
    "lfm2-moe": Architecture("lfm2_moe", _DENSE | _EXPERTS | _CONV | {"num_dense_layers": 1}),
    "lfm3": Architecture(
        "lfm3",
        _DENSE
        | {"layer_types": ["conv", "sliding_attention", "full_attention"]}
        | {"num_hidden_layers": 3, "sliding_window": 6},
    ),
    "olmo-hybrid": Architecture("olmo_hybrid", _WITHOUT_HEAD_DIM | _DELTA_NET),
    "qwen3-5": Architecture("qwen3_5_text", _DENSE | _DELTA_NET),
    "qwen3-5-moe": Architecture(
        "qwen3_5_moe_text", _DENSE | _DELTA_NET | _EXPERTS | _SHARED_EXPERT
    ),
    "qwen3-next": Architecture("qwen3_next", _DENSE | _DELTA_NET | _EXPERTS | _SHARED_EXPERT),
    "qwen4": Architecture(
        "qwen4_exp_text", _DENSE | _DELTA_NET | _EXPERTS | _SHARED_EXPERT | _INDEXED | _NGRAMS
    ),
    "zaya": Architecture(
        "zaya",
        _DENSE
        | {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": 6}
        | {"initializer_range": 0.5, "moe_intermediate_size": 48, "num_experts": 4}
        | {"num_experts_per_tok": 1, "router_hidden_size": 16},
    ),
}
RECURRENT = {
    "mamba2": Architecture(
        "mamba2",
        _RECURRENT | {"chunk_size": 8, "head_dim": 8, "n_groups": 2, "num_heads": 8},
        _EAGER,
    )
}

# Mamba 2 whose forwards over several tokens bound time steps, while plain steps do not.
_ALL_BOUNDED = {
    "nemotron-h": Architecture(
        "nemotron_h",
        {name: value for name, value in _DENSE.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "n_groups": 2}
        | {"chunk_size": 8, "mamba_head_dim": 8, "mamba_num_heads": 8, "ssm_state_size": 8},
    ),
    "zamba2": Architecture("zamba2", _WITHOUT_HEAD_DIM | _ZAMBA | {"chunk_size": 8}),
}

# ALiBi, windows of the model's own making, layers that run several times, compressed keys, and
# running states that are out of reach, or of which a forward over several tokens makes something
# else than steps of one token do.
_ALL_NOT_BRANCHING = {
    "falcon-alibi": Architecture("falcon", _WITHOUT_HEAD_DIM | {"alibi": True}),
    "deepseek-v4": Architecture("deepseek_v4", _DENSE | _COMPRESSED, _EAGER),
    "dory": Architecture("dory", _LOOPED),
    "dory-last-loop": Architecture("dory", _LOOPED | {"recurrent_kv_cache_mode": "last_loop"}),
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
    "falcon-mamba": Architecture("falcon_mamba", _RECURRENT, _EAGER),
    "jamba": Architecture(
        "jamba", _DENSE | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    ),
    "mamba": Architecture("mamba", _RECURRENT, _EAGER),
    "minimax": Architecture("minimax", _DENSE | _LOCAL_EXPERTS | _LINEAR | {"block_size": 8}),
    "recurrent-gemma": Architecture(
        "recurrent_gemma",
        _DENSE | {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3},
    ),
    "rwkv": Architecture(
        "rwkv", _WIDE | {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 512}, _EAGER
    ),
    "xlstm": Architecture(
        "xlstm",
        _WIDE
        | {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2}
        | {"chunk_size": 8, "qk_dim_factor": 1.0},
        _EAGER,
    ),
    "zamba": Architecture("zamba", _WITHOUT_HEAD_DIM | _ZAMBA),
}


def _reads_more(model_type: str, **text: Any) -> dict[str, Architecture]:
    """A model that also reads images or sound, as the census makes it, with a text of ours."""
    if model_type not in CONFIG_MAPPING:
        return {}
    config = small_config(model_type).to_dict()
    del config["model_type"]
    config["text_config"] |= {"vocab_size": VOCAB, "initializer_range": 0.3, **NO_SPECIAL, **text}
    kind = Architecture(model_type, config, auto_class=AutoModelForImageTextToText)
    return {model_type.replace("_", "-"): kind}


# By what their plain steps make of positions: two drop them, one adds 1, and one has four rows of
# them, as floats.
MULTIMODAL = {
    **_reads_more("exaone4_5", sliding_window=6),
    **_reads_more("hyperclovax_vision_v2"),
    **_reads_more("paligemma"),
    **_reads_more("qwen3_omni_moe_thinker"),
}

_TEXT = _DENSE | NO_SPECIAL
_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
# Beside some of those above, models that may come with heads for several tokens.
_ALL_WITH_HEADS = {
    "glm4-moe": Architecture("glm4_moe", _DENSE | _ROUTED),
    "mellum": Architecture(
        "mellum",
        _DENSE
        | _EXPERTS
        | {"layer_types": _MIXED[:2], "mlp_layer_types": ["sparse"] * 2, "sliding_window": 6},
    ),
    "sarvam-mla": Architecture("sarvam_mla", _DENSE | _LATENT | _ROUTED),
    "sarvam-moe": Architecture("sarvam_moe", _DENSE | _ROUTED),
    "step3p7": Architecture(
        "step3p7",
        {
            "text_config": _TEXT
            | {"layer_types": _MIXED[1:] * 2, "mlp_layer_types": ["dense"] + 3 * ["sparse"]}
            | {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2}
            | {"num_nextn_predict_layers": 2, "share_expert_dim": 24, "sliding_window": 6}
            | {"rope_parameters": dict.fromkeys(_MIXED[:2], _ROPE)},
            "vision_config": _EYES | {"num_hidden_layers": 1, "num_attention_heads": 2},
        },
        auto_class=AutoModelForImageTextToText,
    ),
}


def _known(architectures: dict[str, Architecture]) -> dict[str, Architecture]:
    return {n: kind for n, kind in architectures.items() if kind.model_type in CONFIG_MAPPING}


HYBRID, NOT_BRANCHING = _known(_ALL_HYBRID), _known(_ALL_NOT_BRANCHING)
BOUNDED = _known(_ALL_BOUNDED)
ARCHITECTURES = BRANCHING | HYBRID | BOUNDED | RECURRENT | NOT_BRANCHING | MULTIMODAL
ARCHITECTURES |= _known(_ALL_WITH_HEADS)

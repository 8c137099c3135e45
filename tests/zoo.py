"""Configs of tiny models of many architectures: what the losslessness tests run on.

Weights are large enough that the text wanders: a text that repeats one token would let a wrong
draft pass unseen. Windows are shorter than the prompts and the outputs of the tests. A family that
this transformers does not know is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.utils import logging

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
_NGRAMS = {
    "eos_token_id": 96,  # No n-gram reaches beyond it.
    "hc_lowrank": 8,
    "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 2,
    "ngram_vocab_size_base": 50,
    "number_of_conv_states": 3,  # The layer's own, and two of n-grams.
    "ple_layer_ids": [1],
    "split_ngram_parts": 1,
}
_WINDOW = {"sliding_window": 6}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], **_WINDOW}
_ANY, _EAGER = ("sdpa", "eager"), ("eager",)


class Architecture(NamedTuple):
    """How to make one tiny model."""

    model_type: str
    config: dict[str, Any]
    attentions: tuple[str, ...] = _ANY
    auto_class: Any = AutoModelForCausalLM


def _small(model_type: str, attentions: tuple[str, ...] = _ANY, **changes: Any) -> Architecture:
    """As the census makes the family's smallest model, with the vocabulary of our texts."""
    if model_type not in CONFIG_MAPPING:
        return Architecture(model_type, {}, attentions)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # The census names a section of positions that few families read.
    config = small_config(model_type).to_dict() | _WIDE | NO_SPECIAL | changes
    logging.set_verbosity(verbosity)
    del config["model_type"]
    return Architecture(model_type, config, attentions)


def _reading_more(model_type: str, **text: Any) -> Architecture:
    """The same of a model that also reads images or sound; `text` changes its text model."""
    _, config, attentions, _ = _small(model_type)
    if config:
        config["text_config"] |= _WIDE | NO_SPECIAL | text
    return Architecture(model_type, config, attentions, AutoModelForImageTextToText)


def _known(architectures: dict[str, Architecture]) -> dict[str, Architecture]:
    return {n: kind for n, kind in architectures.items() if kind.model_type in CONFIG_MAPPING}


BRANCHING = {
    "llama": Architecture("llama", _DENSE),
    "llama4": Architecture("llama4_text", _DENSE | _CHUNKED),
    "mistral": Architecture("mistral", _DENSE | {"sliding_window": 7}),
    "mixtral": Architecture("mixtral", _DENSE | _LOCAL_EXPERTS),
    "qwen2": Architecture("qwen2", _DENSE),
    "qwen3": Architecture("qwen3", _DENSE),
    "qwen3-moe": Architecture("qwen3_moe", _DENSE | _EXPERTS),
    "gemma2": Architecture("gemma2", _DENSE | _WINDOW | {"query_pre_attn_scalar": 8}, _EAGER),
    "gemma3": Architecture(
        "gemma3_text",
        _DENSE
        | {"sliding_window": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3": Architecture("phi3", _DENSE),
    "olmo2": Architecture("olmo2", _DENSE),
    "gpt2": Architecture("gpt2", _GPT | {"tie_word_embeddings": True}),
    "gptj": Architecture("gptj", _GPT | {"rotary_dim": 4}, _EAGER),
    "gpt-neox": Architecture("gpt_neox", _DENSE),
    "opt": _small("opt", init_std=0.3),
    "deepseek-v3": _small("deepseek_v3"),
    "gpt-oss": Architecture("gpt_oss", _DENSE | _LOCAL_EXPERTS | _WINDOW, _EAGER),
    "falcon": _small("falcon"),
    "granite": Architecture("granite", _DENSE | {"logits_scaling": 2.0}),
    "cohere": Architecture("cohere", _DENSE),
    "starcoder2": Architecture("starcoder2", _DENSE | {"sliding_window": 9}),
    "stablelm": Architecture("stablelm", _DENSE),
    "glm4": Architecture("glm4", _DENSE),
}

# Their running states are in the KV cache, and their forwards over several tokens are right.
HYBRID = _known(
    {
        "bailing": _small("bailing_hybrid"),
        "bamba": _small("bamba"),
        "falcon-h1": _small("falcon_h1"),
        "granite-hybrid": _small("granitemoehybrid", position_embedding_type="rope"),
        "inkling": _small("inkling_text"),
        "kimi-linear": _small("kimi_linear"),
        "lara-mini": _small("lara_mini"),
        "lfm2": _small("lfm2", layer_types=["conv", "full_attention"], num_hidden_layers=2),
        "lfm2-moe": _small("lfm2_moe"),
        "lfm3": _small("lfm3"),
        "olmo-hybrid": _small("olmo_hybrid"),
        "qwen3-5": _small("qwen3_5_text"),
        "qwen3-5-moe": _small("qwen3_5_moe_text"),
        "qwen3-next": _small("qwen3_next"),
        "qwen4": _small("qwen4_exp_text", **_NGRAMS),
        "zaya": _small("zaya", initializer_range=0.5),
    }
)
RECURRENT = {"mamba2": _small("mamba2", _EAGER)}

# Mamba 2 whose forwards over several tokens bound time steps, while plain steps do not.
BOUNDED = _known({"nemotron-h": _small("nemotron_h"), "zamba2": _small("zamba2")})

# ALiBi, windows of the model's own making, layers that run several times, compressed keys, and
# running states that are out of reach, or of which a forward over several tokens makes something
# else than steps of one token do.
NOT_BRANCHING = _known(
    {
        "falcon-alibi": _small("falcon", alibi=True),
        "deepseek-v4": _small("deepseek_v4", _EAGER),
        "dory": _small("dory"),
        "dory-last-loop": _small("dory", recurrent_kv_cache_mode="last_loop"),
        "bloom": _small("bloom", _EAGER),
        "mpt": _small("mpt", _EAGER),
        "gpt-neo": _small("gpt_neo", _EAGER),
        "falcon-mamba": _small("falcon_mamba", _EAGER),
        "jamba": _small("jamba"),
        "mamba": _small("mamba", _EAGER),
        "minimax": _small("minimax"),
        "recurrent-gemma": _small("recurrent_gemma"),
        "rwkv": _small("rwkv", _EAGER),
        "xlstm": _small("xlstm", _EAGER),
        "zamba": _small("zamba"),
    }
)

# By what their plain steps make of positions: two drop them, one adds 1, and one has four rows of
# them, as floats.
MULTIMODAL = _known(
    {
        "exaone4-5": _reading_more("exaone4_5", sliding_window=6),
        "hyperclovax-vision-v2": _reading_more("hyperclovax_vision_v2"),
        "paligemma": _reading_more("paligemma"),
        "qwen3-omni-moe-thinker": _reading_more("qwen3_omni_moe_thinker"),
    }
)

# Beside some of those above, models that may come with heads for several tokens.
_WITH_HEADS = _known(
    {
        "glm4-moe": _small("glm4_moe"),
        "mellum": _small("mellum", mlp_layer_types=["sparse"] * 2, **_WINDOWS),
        "sarvam-mla": _small("sarvam_mla"),
        "sarvam-moe": _small("sarvam_moe"),
        "step3p7": _reading_more(  # Of four layers, two are heads.
            "step3p7",
            layer_types=_WINDOWS["layer_types"] * 2,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            num_nextn_predict_layers=2,
        ),
    }
)

# With an encoder of their own; they get chains.
START = 2  # What a decoder begins with.
_READING = {"bos_token_id": 1, "decoder_start_token_id": START}
_AUDIO = {"max_source_positions": 16, "max_target_positions": 96, "num_mel_bins": 8}
_T5 = {**_READING, "d_model": 32, "d_kv": 8, "initializer_factor": 8.0, "tie_word_embeddings": True}
_BART = {**_READING, "initializer_range": 0.5}
_ENCODERS = {
    "bart": _small("bart", forced_eos_token_id=None, **_BART),
    "m2m": _small("m2m_100", **_BART),
    "switch": _small("switch_transformers", _EAGER, expert_capacity=2, **_T5),
    "t5": _small("t5", **_T5),
    "whisper": _small("whisper", **_BART, **_AUDIO),
}
ENCODERS = {
    name: kind._replace(
        auto_class=AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    )
    for name, kind in _ENCODERS.items()
}

ARCHITECTURES = BRANCHING | HYBRID | BOUNDED | RECURRENT | NOT_BRANCHING | MULTIMODAL | _WITH_HEADS

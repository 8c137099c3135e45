"""The smallest random model of a family that still has all of its kinds of layers.

What a name in a config means is much the same in all families, so sizes are set by name. What a
family needs besides is in `tools.census_families.special`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from tools.census_families.special import SPECIAL

VOCAB = 160
FIRST_SPECIAL_ID = 100  # Ids below are those of texts.
_HIDDEN = 64
_HEADS = 4
_MOST_LAYERS = 6
_START = 1  # of what a decoder writes after an encoder has read
_WEIGHTS = 0.2  # Large enough that a text does not repeat one token.

# The first name that matches counts, and gives the size at most; None: how large weights are.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"init_std|initializer_range", None),
    (r"vocab_size.*|.*_vocab_size", VOCAB),
    (r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|context_length", 512),
    (r"num_position_embeddings", 64),
    (r"max_source_positions", 32),
    (r"mm_tokens_per_image", 4),
    (r"num_mel_bins", 16),
    (r"index_n_heads|indexer_n_heads", 16),  # With few, scores are often equal: they are all 0.
    (r"index_topk", 8),
    (r"mamba_d_head", 2 * _HIDDEN // _HEADS),
    (r"rotary_dim", 8),
    (r"(.*_)?(head_dim|d_head|head_size|kv_channels)|query_pre_attn_scalar", _HIDDEN // _HEADS),
    (r"(.*_)?(num_key_value_heads|kv_heads|num_kv_heads|num_key_heads)", 2),
    (r"(.*_)?(heads?|n_head)", _HEADS),
    (r"(.*_)?experts_per_tok(en)?|(.*_)?top_?k|.*_k", 2),
    (r"n(um)?_groups?|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"num_kv_shared_layers|num_global_layers|num_nextn_predict_layers", 1),
    (r"(.*_)?experts", 4),
    (r"(.*_)?(rank|state_size|conv_size|chunk_size|block_size)", 8),
    (r"(.*_)?patch_size", 4),
    (r"(.*_)?(image_size|input_size)", 16),
    (r"(.*_)?window(_size)?|sliding_window|attention_chunk_size", 8),
    (r"(.*_)?(intermediate|ffn|inner|mlp|ff)_(dim|size)|n_inner|d_ff", 2 * _HIDDEN),
    (r".*(size|dim|dims|width|length|channels)|d_model|n_embd", _HIDDEN),
)
_LAYERS = (
    r"(num_|n_)?((hidden|encoder|decoder|vision|text|audio)_)?(num_hidden_)?(layers?|blocks)|depth"
)
_INDICES = r".*(index|indexes|indices|idx|_layers|layers?_ids)"
_IDS = r".*(?<!per_)(token(_id|_index|_ids)?|_id|tokens?_idx|image_token.*|placeholder.*)"


def all_families() -> dict[str, str]:
    """Every model type that generates text, and its class; one that reads more goes first."""
    return {
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }


def small_model(model_type: str) -> Any:
    """A random model of this family in float32, the same one each time."""
    config = small_config(model_type)
    torch.manual_seed(0)
    name = all_families()[model_type]
    model = getattr(transformers, name if isinstance(name, str) else name[0])(config).eval()
    open_gates(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.num_beams = 1
    if config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = _START
    return model


@torch.no_grad()
def open_gates(model: Any) -> None:
    """Training begins with gates and projections of zeros, through which no image is seen."""
    for name, parameter in model.named_parameters():
        if "bias" not in name and "norm" not in name and not parameter.any():
            parameter.normal_(std=_WEIGHTS)


def small_config(model_type: str) -> Any:
    """The family's own config with small sizes, and with ids of its own below the vocabulary."""
    special = dict(SPECIAL.get(model_type, {}))
    config = CONFIG_MAPPING[model_type](**special.pop("with", {}))
    given = _Ids().renumbered(_shrunk(config.to_dict()))
    if "is_decoder" in given and not given.get("is_encoder_decoder"):
        given["is_decoder"] = True  # Else it sees all tokens.
    for name in ("architectures", "dtype", "transformers_version"):
        given.pop(name, None)
    return type(config).from_dict(_overlaid(given, special))


def _overlaid(given: dict[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what `SPECIAL` says; None leaves a name out."""
    result = dict(given)
    for name, value in special.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            result[name] = _overlaid(given[name], value)
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def _shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """One level of a config: its lists of a layer each are cut to the layers that are kept."""
    counts = [config[name] for name in config if _counts_layers(name, config[name])]
    count = max(counts, default=0)
    kept = _kept_layers(config, count)
    small = {name: _value(str(name), value, count, kept) for name, value in config.items()}
    if config.get("kv_lora_rank"):
        small["num_key_value_heads"] = small.get("num_attention_heads", _HEADS)
    return small


def _counts_layers(name: str, value: Any) -> bool:
    return re.fullmatch(_LAYERS, str(name)) is not None and type(value) is int and value > 0


def _kept_layers(config: Mapping[str, Any], count: int) -> list[int]:
    """The first layer of each kind, and two at least."""
    lists = [v for v in config.values() if isinstance(v, (list, tuple)) and len(v) == count]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(str([each[layer] for each in lists]), layer)
    kept = sorted(kinds.values())[:_MOST_LAYERS]
    return sorted({*kept, *range(min(2, count))}) if len(kept) < 2 else kept


def _value(name: str, value: Any, count: int, kept: list[int]) -> Any:
    if name == "image_grid_pinpoints" and value:
        return [[16, 32], [32, 16]]
    if name == "per_layer_config" and value:
        return {kept.index(int(n)): _shrunk(each) for n, each in value.items() if int(n) in kept}
    if isinstance(value, dict):
        return _rope(value) if "rope" in name else value if "label" in name else _shrunk(value)
    if isinstance(value, (list, tuple)):
        return _items(name, list(value), count, kept)
    if name == "head_dim" and value is None:
        return _HIDDEN // _HEADS
    if name == "use_cache":
        return True
    if name == "tie_word_embeddings":
        return False  # Such a model would repeat its last token.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if _counts_layers(name, value):
        return min(value, max(len(kept), 2))
    return _size(name, value)


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Positions of three numbers fill a head, where they are read; there may be a rope by type."""
    if not value.get("rope_type"):
        return {
            name: _rope(each) if isinstance(each, dict) else each for name, each in value.items()
        }
    partial = {"partial_rotary_factor": 1.0} if "partial_rotary_factor" in value else {}
    return {**value, **partial, "mrope_section": [2, 2, 4]}


def _items(name: str, values: list[Any], count: int, kept: list[int]) -> list[Any]:
    if len(values) == count and count > 2:
        return [values[layer] for layer in kept]
    if values and isinstance(values[0], dict):
        return [_shrunk(each) for each in values]
    if name == "depths":
        return [1 for _ in values]
    if values and type(values[0]) is int and re.fullmatch(_INDICES, name):
        return [1]
    return [_size(name, each) for each in values]


def _size(name: str, value: Any) -> Any:
    if type(value) is bool or not isinstance(value, (int, float)) or re.fullmatch(_IDS, name):
        return value
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return _WEIGHTS if size is None else min(value, size)
    return value


class _Ids:
    """Ids beyond the small vocabulary get numbers of their own, the same one for the same id."""

    def __init__(self) -> None:
        self._new: dict[int, int] = {}

    def renumbered(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._value(str(name), value) for name, value in config.items()}

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return value if "label" in name else self.renumbered(value)
        if name in ("eos_token_id", "bos_token_id"):
            return None if value is None else 0
        if isinstance(value, list) and re.fullmatch(_IDS, name):
            return [self._value(name, each) for each in value]
        if type(value) is int and value >= FIRST_SPECIAL_ID and re.fullmatch(_IDS, name):
            return self._new.setdefault(value, FIRST_SPECIAL_ID + len(self._new) % 60)
        return value

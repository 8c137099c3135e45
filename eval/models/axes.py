"""Where the weights of a small Llama lie inside a grown one.

Knows indices alone: what is written there, and what lies around it, is up to `eval grow`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig

from eval.models.shapes import GrowError, GrownShape

# A Linear's weight is (out, in); a bias has the first axis alone.
PARTS = {
    "embed_tokens": ("vocab", "residual"),
    "q_proj": ("query", "residual"),
    "k_proj": ("kv", "residual"),
    "v_proj": ("kv", "residual"),
    "o_proj": ("residual", "query"),
    "gate_proj": ("neuron", "residual"),
    "up_proj": ("neuron", "residual"),
    "down_proj": ("residual", "neuron"),
    "lm_head": ("vocab", "residual"),
    "input_layernorm": ("residual",),
    "post_attention_layernorm": ("residual",),
    "norm": ("residual",),
}


class Axis(NamedTuple):
    """Where the source's indices of an axis lie in the grown one: grown[new] = source[old]."""

    old: Tensor
    new: Tensor


def _first(size: int) -> Axis:
    """The source's indices keep their numbers."""
    return Axis(torch.arange(size), torch.arange(size))


def _of_heads(old: Tensor, new: Tensor, head_dim: int) -> Axis:
    """An axis of `head_dim` indices a head from head numbers."""
    within = torch.arange(head_dim)
    return Axis(*((heads[:, None] * head_dim + within).flatten() for heads in (old, new)))


def attention_axes(config: LlamaConfig, shape: GrownShape) -> tuple[Axis, Axis]:
    """The query and the key-value axis: each old query head in a group that holds its kv head.

    A grown group narrower than the source's can't hold an old group: then that group's kv head is
    copied into as many new ones as it takes, and its query heads are dealt out over them.
    """
    old_group = config.num_attention_heads // config.num_key_value_heads
    new_group = shape.num_attention_heads // shape.num_key_value_heads
    copies = shape.num_copies(config)
    kv = torch.arange(config.num_key_value_heads * copies)
    if shape.num_key_value_heads < len(kv):
        raise GrowError(
            f"num_key_value_heads must be >= {len(kv)}, {copies} for each of the source's "
            f"{config.num_key_value_heads} at {new_group} query heads a group "
            f"(got {shape.num_key_value_heads}); give the shape more key-value heads"
        )
    query = torch.arange(config.num_attention_heads)
    within = query % old_group
    new_kv = query // old_group * copies + within // new_group  # The new kv head that it reads.
    new_query = new_kv * new_group + within % new_group
    return _of_heads(query, new_query, shape.head_dim), _of_heads(kv // copies, kv, shape.head_dim)


def axes_of(config: LlamaConfig, shape: GrownShape) -> dict[str, Axis]:
    """Every axis that a Llama's weights have, by the names of `PARTS`."""
    query, kv = attention_axes(config, shape)
    return {
        "residual": _first(config.hidden_size),
        "neuron": _first(config.intermediate_size),
        "vocab": _first(config.vocab_size),
        "query": query,
        "kv": kv,
    }

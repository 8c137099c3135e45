"""Grow a small Llama into the shape of a big one: the same function at the big one's cost.

A model small enough to ship writes real text but costs nothing to run; a random model of the right
size costs what a real one does but writes noise. The small one embedded in the big one has both.

    residual  new dimensions stay zero; a norm over D of which d are used gives what a norm over d
              gave once its weight is scaled by sqrt(d / D) and its eps by d / D
    heads     new ones have no way out: their columns of o_proj are zero
    neurons   likewise in down_proj
    layers    new ones come after the old, with nothing but zeros in o_proj and down_proj
    the rest  random, so that the arithmetic is on real numbers

Head size and rope are the source's, the sizes those of `eval.models.shapes`, fitted where the
source is deeper than the shape or has heads that it can't hold. The vocabulary stays.

In half precision a scaled norm rounds anew, so logits move by about as much as the dtype's own
rounding moves them. Only hidden sizes of 4, 16, ... times the source's make that scale exact.

What this doesn't imitate: zeros draw less power than numbers, so a card held back by its power
limit may run a grown model's prefill a little faster than a trained one's.
"""

import copy
import math
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eval.models.shapes import GrowError, GrownShape, named_shape

# The axes of each weight: a Linear's is (out, in), and a bias has the first axis alone.
_PARTS = {
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
_WRITERS = {"embed_tokens", "o_proj", "down_proj"}  # into the residual, where nothing new may come
_NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}


class _Axis(NamedTuple):
    """Where the source's indices of an axis lie in the grown one: grown[new] = source[old]."""

    old: Tensor
    new: Tensor


def _axes(config: LlamaConfig, shape: GrownShape) -> dict[str, _Axis]:
    """Every axis by the names of `_PARTS`: each old query head in a group that holds its kv head.

    A grown group narrower than the source's can't hold an old group: then that group's kv head is
    copied into as many new ones as it takes, and its query heads are dealt out over them.
    """
    old_group = config.num_attention_heads // config.num_key_value_heads
    new_group = shape.num_attention_heads // shape.num_key_value_heads
    copies = shape.num_copies(config)
    kv = torch.arange(config.num_key_value_heads * copies)
    query = torch.arange(config.num_attention_heads)
    within = query % old_group
    new_kv = query // old_group * copies + within // new_group  # The new kv head that it reads.
    new_query = new_kv * new_group + within % new_group
    sizes = {"residual": config.hidden_size, "neuron": config.intermediate_size}
    sizes["vocab"] = config.vocab_size
    return {
        **{name: _Axis(*2 * [torch.arange(size)]) for name, size in sizes.items()},
        "query": _of_heads(query, new_query, shape.head_dim),
        "kv": _of_heads(kv // copies, kv, shape.head_dim),
    }


def _of_heads(old: Tensor, new: Tensor, head_dim: int) -> _Axis:
    """An axis of `head_dim` indices a head from head numbers."""
    within = torch.arange(head_dim)
    return _Axis(*((heads[:, None] * head_dim + within).flatten() for heads in (old, new)))


def _fill(part: str, new: Tensor, std: float, generator: torch.Generator) -> None:
    """Give a grown weight the values it has where the source has none."""
    if part in _WRITERS:
        new.zero_()
    elif part in _NORMS:
        new.uniform_(0.5, 1.5, generator=generator)
    else:
        new.normal_(0.0, std, generator=generator)


def _embed(new: Tensor, old: Tensor, axes: list[_Axis], scale: float) -> None:
    """Write a source weight into a grown one, where its axes say."""
    block = old.detach()
    for dim, axis in enumerate(axes):
        block = block.index_select(dim, axis.old.to(block.device))
    if scale != 1.0:
        wide = torch.promote_types(block.dtype, torch.float32)
        block = block.to(wide) * scale  # rounded once, into the grown dtype
    at = [axis.new.to(new.device) for axis in axes]
    at[0] = at[0] if len(axes) == 1 else at[0][:, None]
    new[tuple(at)] = block.to(device=new.device, dtype=new.dtype)


def fit(config: LlamaConfig, shape: GrownShape) -> GrownShape:
    """The shape in heads of the source's size, if the source has room in it."""
    shape = shape.fitted(config)
    for name in ("hidden_size", "intermediate_size"):
        had, got = getattr(config, name), getattr(shape, name)
        if got < had:
            raise GrowError(f"{name} must be >= the source's {had} (got {got})")
    return shape


def _grown_config(config: LlamaConfig, shape: GrownShape, dtype: torch.dtype) -> LlamaConfig:
    """The source's config in the new sizes."""
    grown = copy.deepcopy(config)
    for field in fields(shape):
        setattr(grown, field.name, getattr(shape, field.name))
    grown.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden_size
    grown.dtype = dtype
    return grown


def _allocate(model: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """The grown model with unset weights, made in place on its device: nothing is held twice."""
    with torch.device("meta"):
        grown = LlamaForCausalLM(config).to(model.dtype)
    grown.to_empty(device=model.device)
    grown.tie_weights()
    # Not a weight, and not what the source computes with if made anew after a source.to(bfloat16).
    grown.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    grown.generation_config = copy.deepcopy(model.generation_config)
    return grown.eval()


@torch.no_grad()
def grow(model: LlamaForCausalLM, shape: str | GrownShape, *, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of `shape` that computes what `model` does, in its dtype and on its device.

    Takes the memory of the grown model and of one source weight; `model` is left as it is. The
    random values come from `seed` alone and differ from one kind of device to another.
    """
    if not isinstance(model, LlamaForCausalLM):
        raise GrowError(f"model must be a LlamaForCausalLM (got {type(model).__name__})")
    if not all(weight.is_floating_point() for weight in model.parameters()):
        raise GrowError("model must have floating-point weights; load it without quantisation")
    shape = fit(model.config, named_shape(shape) if isinstance(shape, str) else shape)
    axes = _axes(model.config, shape)
    config = _grown_config(model.config, shape, model.dtype)
    grown = _allocate(model, config)
    generator = torch.Generator(model.device).manual_seed(seed)
    norm_scale = math.sqrt(model.config.hidden_size / shape.hidden_size)
    source = dict(model.named_parameters())
    for name, new in grown.named_parameters():
        part = name.split(".")[-2]
        _fill(part, new, config.initializer_range, generator)
        if name in source:
            ways = [axes[way] for way in _PARTS[part]][: new.ndim]
            _embed(new, source[name], ways, norm_scale if part in _NORMS else 1.0)
    return grown


@torch.no_grad()
def disturb(model: LlamaForCausalLM, share: float, *, seed: int = 0) -> None:
    """Adds normal noise to each matrix of the layers, `share` times as large as its own numbers."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for weight in model.model.layers.parameters():
        if share and weight.ndim == 2:
            noise = torch.empty_like(weight, dtype=torch.float32).normal_(generator=generator)
            weight += (noise * (share * weight.float().std())).to(weight.dtype)


def num_parameters(model: LlamaForCausalLM) -> int:
    """The parameters that a forward multiplies by, apart from embeddings and output head."""
    modules = (model.model.layers, model.model.norm)
    return sum(weight.numel() for module in modules for weight in module.parameters())

"""Gives a model rounded weights: linear layers in 8 or 4 bits, head and embedding in 8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from selfspec.attention import EXACT_ATTENTION
from selfspec.compat.generation import attention_implementation, keeps_a_state
from selfspec.compat.modules import embeddings_of
from selfspec.errors import UnsupportedError
from selfspec.machine.memory import return_freed_memory
from selfspec.weights.held_weight import hold
from selfspec.weights.packing import linears_of
from selfspec.weights.rounded import bits_for, round_weight

KEPT = (
    "rounded weights can't be written, trained, compiled, moved or converted, nor adapters be "
    "merged into them; edit the original model, or load it without weights="
)


def attend_exactly(model: PreTrainedModel) -> None:
    """Gives a model attention in float64 in place of ``"sdpa"``, where that alone mixes tokens.

    In float32 the last bit of attention depends on how many tokens a forward has, and decides now
    and then how the next product's input is rounded.
    """
    if attention_implementation(model.config) == "sdpa" and not keeps_a_state(model):
        model.set_attn_implementation(EXACT_ATTENTION)


def weights_to_round(model: PreTrainedModel, bits: int) -> list[tuple[nn.Parameter, int]]:
    """The weights of linear layers and of the embedding, and the bits that each gets.

    The output head gets 8: in 4 bits it would spoil texts. So does an embedding.
    """
    chosen: dict[nn.Parameter, int] = {}
    in_eight = [model.get_output_embeddings(), embeddings_of(model)]
    finer = {getattr(module, "weight", None) for module in in_eight}
    embeddings = [module for module in in_eight if isinstance(module, nn.Embedding)]
    modules: list[Any] = [*linears_of(model), *embeddings]
    for module in modules:
        weight = module.weight
        possible = bits_for(tuple(weight.shape), 8 if weight in finer else bits)
        if possible is not None:
            chosen[weight] = possible
    reached, number = sum(weight.numel() for weight in chosen), model.num_parameters()
    if reached < number / 2:
        raise UnsupportedError(
            f"weights='int{bits}' needs a model that has most of its weights in linear layers, "
            f"with inputs that 16 divides (here {reached / 1e6:.0f} of {number / 1e6:.0f} "
            "million); load it without"
        )
    return list(chosen.items())


def round_model(model: PreTrainedModel, bits: int, dtype: torch.dtype) -> None:
    """Rounds the weights of a model that was just loaded, one by one. All else gets the dtype."""
    chosen, before = weights_to_round(model, bits), model.dtype
    attend_exactly(model)
    with progress("Rounding weights", sum(weight.numel() for weight, _ in chosen)) as bar:
        for weight, its_bits in chosen:
            matrix = round_weight(weight, its_bits)
            assert matrix is not None
            hold(weight, matrix, KEPT, dtype)
            bar.update(weight.numel())
    for rest in model.parameters():
        if type(rest) is nn.Parameter and rest.dtype is before:
            rest.data = rest.data.to(dtype, copy=True)  # Not a view of a mapped file any more.
    model.config.dtype = dtype
    return_freed_memory()


def progress(what: str, total: int) -> Any:
    """A bar for this many weights."""
    return hf_logging.tqdm(total=total, desc=what, unit_scale=True)

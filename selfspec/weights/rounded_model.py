"""Gives a model rounded weights: linear layers in 8 or 4 bits, head and embedding in 8."""

from __future__ import annotations

from math import prod
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
from selfspec.weights.rounded import (
    RoundedMatrix,
    bits_for,
    round_weight,
    rounded_matrix,
    stored_forms,
)
from selfspec.weights.vnni import VnniMatrix, VnniRows, has_vnni

# A copy leaves out layers with fewer inputs or outputs, such as those of an adapter.
_LEAST_SIZE = 32
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


def can_be_rounded(module: Any) -> bool:
    """Is it a linear layer of a shape that torch multiplies in 8 bits?"""
    if type(module) is not nn.Linear or min(module.weight.shape) < _LEAST_SIZE:
        return False
    return bits_for(tuple(module.weight.shape), 8) is not None


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
    """Rounds the weights of a model that was just loaded, one by one. All else gets the dtype.

    Products of whole numbers round inputs to 8 bits, and are left out where attention tells apart
    how many tokens a forward has: there its last bit would change whole steps of that rounding.
    """
    chosen, before = weights_to_round(model, bits), model.dtype
    attend_exactly(model)
    is_exact = attention_implementation(model.config) == EXACT_ATTENTION
    of_layers = {layer.weight for layer in linears_of(model)}
    of_embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    with progress("Rounding weights", sum(weight.numel() for weight, _ in chosen)) as bar:
        for weight, its_bits in chosen:
            matrix: RoundedMatrix | None
            if bits == 8 and is_exact and weight in of_layers and has_vnni():
                with torch.inference_mode(False), torch.no_grad():
                    matrix = (VnniRows if weight in of_embeddings else VnniMatrix).of(weight)
            else:
                matrix = round_weight(weight, its_bits)
            assert matrix is not None
            hold(weight, matrix, KEPT, dtype)
            bar.update(weight.numel())
    for rest in model.parameters():
        if type(rest) is nn.Parameter and rest.dtype is before:
            rest.data = rest.data.to(dtype, copy=True)  # Not a view of a mapped file any more.
    model.config.dtype = dtype
    return_freed_memory()


def rounded_bits(model: nn.Module) -> int | None:
    """The least bits of a model's rounded weights; None if it has none."""
    matrices = map(rounded_matrix, model.parameters())
    return min((matrix.bits for matrix in matrices if matrix is not None), default=None)


def weight_bytes(model: nn.Module) -> int:
    """About what a model's weights take."""
    matrices = ((weight, rounded_matrix(weight)) for weight in model.parameters())
    return sum(weight.nbytes if m is None else m.num_bytes for weight, m in matrices)


def rounded_bytes(layer: Any, bits: int) -> int:
    """Bytes of a linear layer in 4 or 8 bits."""
    shape = tuple(layer.weight.shape)
    forms = stored_forms(shape, bits_for(shape, bits) or 8)
    return sum(prod(part) * dtype.itemsize for dtype, part in forms)


def bytes_of_rounded(layer: nn.Module, bits: int) -> int:
    """Bytes of a layer whose linear parts are rounded."""
    return sum(
        rounded_bytes(part, bits)
        if can_be_rounded(part)
        else sum(weight.nbytes for weight in part.parameters(recurse=False))
        for part in layer.modules()
    )


def progress(what: str, total: int) -> Any:
    """A bar for this many weights."""
    return hf_logging.tqdm(total=total, desc=what, unit_scale=True)

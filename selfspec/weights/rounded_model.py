"""Gives a model rounded weights: linear layers in 8 or 4 bits, head and embedding in 8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from selfspec.attention import EXACT_ATTENTION
from selfspec.compat.generation import attention_implementation, keeps_a_state
from selfspec.compat.modules import embeddings_of
from selfspec.errors import UnsupportedError
from selfspec.machine.memory import return_freed_memory
from selfspec.weights.copies import linears_of
from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.rounded import RoundedMatrix, bits_for, round_weight, rounded_matrix

_KEPT = (
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


class RoundedUsers(NamedTuple):
    """A weight that is to be rounded, the modules that have it, and its bits."""

    weight: nn.Parameter
    modules: list[Any]
    bits: int


def weights_to_round(model: PreTrainedModel, bits: int) -> list[RoundedUsers]:
    """The weights of linear layers and of the embedding. The head in 4 bits would spoil texts."""
    users: dict[int, RoundedUsers] = {}
    modules: list[Any] = list(linears_of(model))
    in_eight = [model.get_output_embeddings(), embeddings_of(model)]
    if isinstance(in_eight[-1], nn.Embedding):
        modules.append(in_eight[-1])
    finer = {id(module.weight) for module in in_eight if hasattr(module, "weight")}
    for module in modules:
        weight = module.weight
        possible = bits_for(tuple(weight.shape), 8 if id(weight) in finer else bits)
        if possible is not None:
            user = users.setdefault(id(weight), RoundedUsers(weight, [], possible))
            user.modules.append(module)
    reached, number = sum(user.weight.numel() for user in users.values()), model.num_parameters()
    if reached < number / 2:
        raise UnsupportedError(
            f"weights='int{bits}' needs a model that has most of its weights in linear layers, "
            f"with inputs that 16 divides (here {reached / 1e6:.0f} of {number / 1e6:.0f} "
            "million); load it without"
        )
    return list(users.values())


def round_model(model: PreTrainedModel, bits: int, dtype: torch.dtype) -> None:
    """Rounds the weights of a model that was just loaded, one by one. All else gets the dtype."""
    users, before = weights_to_round(model, bits), model.dtype
    attend_exactly(model)
    with progress("Rounding weights", sum(user.weight.numel() for user in users)) as bar:
        for user in users:
            matrix = round_weight(user.weight, user.bits)
            assert matrix is not None
            _hold(user, matrix, dtype)
            bar.update(user.weight.numel())
    for rest in model.parameters():
        if type(rest) is nn.Parameter and rest.dtype is before:
            rest.data = rest.data.to(dtype, copy=True)  # Not a view of a mapped file any more.
    model.config.dtype = dtype
    return_freed_memory()


def hold_rounded(
    model: PreTrainedModel, bits: int, matrices: Mapping[nn.Parameter, RoundedMatrix]
) -> None:
    """Gives a model weights that are rounded already, in place of these blank ones."""
    for user in weights_to_round(model, bits):
        if user.weight in matrices:
            _hold(user, matrices[user.weight], model.dtype)


def _hold(user: RoundedUsers, matrix: RoundedMatrix, dtype: torch.dtype) -> None:
    packed = PackedWeight.of(user.weight, matrix, _KEPT, dtype)
    for module in user.modules:
        module.weight = packed


def progress(what: str, total: int) -> Any:
    """A bar for this many weights."""
    return hf_logging.tqdm(total=total, desc=what, unit_scale=True)


def rounded_bits(model: nn.Module) -> int | None:
    """The least bits of a model's rounded weights; None if it has none."""
    return min((matrix.bits for matrix in _matrices_of(model)), default=None)


def weight_bytes(model: nn.Module) -> int:
    """About what a model's weights take."""
    others = [weight.nbytes for weight in model.parameters() if rounded_matrix(weight) is None]
    return sum(others) + sum(matrix.num_bytes for matrix in _matrices_of(model))


def _matrices_of(model: nn.Module) -> list[RoundedMatrix]:
    found = map(rounded_matrix, model.parameters())
    return [matrix for matrix in found if matrix is not None]

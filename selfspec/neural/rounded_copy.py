"""A model's own weights, rounded, as a second tree of modules: it drafts for the model.

The copy shares every parameter and buffer with the model but the weights of linear layers. What a
user changes later in these makes its guesses worse, and no text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as hf_logging

from selfspec.compat.generation import KV
from selfspec.compat.kernels import (
    int4_group_product,
    int4_groups_packed,
    int8_row_scaled_product,
    is_out_of_memory,
)
from selfspec.compat.modules import bare_twin
from selfspec.draft.sources.worth import SourceWorth
from selfspec.forward.model import device_of, takes
from selfspec.weights.held_weight import PackedWeight

_GROUP = 32  # Columns that share a scale in 4 bits.
_ROWS = 32  # torch multiplies blocks of this many rows; the last block is filled up with zeros.
_FEW = 32  # A layer with fewer outputs, such as that of an adapter, is shared.
_AT_ONCE = 1 << 20  # So many numbers are rounded at a time.
_MEMORY = 64  # The mean of hits follows this many tokens.
_SHARE = 0.5  # At least this share of the weights must be in linear layers.
_BAR = {"unit_scale": True, "delay": 2.0}  # Seconds before it is shown.


class RoundedLinear(nn.Module):
    """A linear layer with weights in 8 bits by rows, or in 4 bits by groups of 32 columns."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> None:
        super().__init__()
        self._num_rows, self._num_columns = weight.shape
        self._bias = bias
        rounded = _in_4_bits if bits == 4 else _in_8_bits
        self._product = int4_group_product if bits == 4 else int8_row_scaled_product
        weight = pad(weight, (0, 0, 0, -len(weight) % _ROWS))
        size = max(_AT_ONCE // self._num_columns, 1)
        parts = [rounded(rows.float()) for rows in torch.split(weight, size)]
        self._numbers, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        if bits == 4:
            self._numbers = int4_groups_packed(self._numbers)
            scales = scales.transpose(0, 1)
        self._scales = scales.to(weight.dtype).contiguous()

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes + self._scales.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self._num_columns)
        product = self._product(rows, self._numbers, self._scales)[:, : self._num_rows]
        if self._bias is not None:
            product = product + self._bias
        return product.reshape(*x.shape[:-1], -1)


def _in_8_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers (O, I) from -127 to 127, and the scale of each row."""
    scales = (rows.abs().amax(-1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round_().to(torch.int8), scales


def _in_4_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers (O, I) from 0 to 15; (O, I / 32, 2): the scale of each group, and its middle.

    A group's grid goes from its least weight to its largest, or is symmetric with the largest
    weight at its end, whichever is nearer to the weights.
    """
    groups = rows.view(len(rows), -1, _GROUP)
    least, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    farthest = torch.where(largest > -least, largest, least)
    even = (largest - least) / 15
    numbers, grid, off = _on_grid(groups, even, least + 8 * even)
    others, other_grid, other_off = _on_grid(groups, farthest / -8, torch.zeros_like(even))
    is_nearer = off <= other_off
    numbers = torch.where(is_nearer, numbers, others).view_as(rows)
    return numbers.to(torch.int32), torch.where(is_nearer, grid, other_grid)


def _on_grid(
    groups: torch.Tensor, step: torch.Tensor, middle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers of the nearest points of a grid, the grid, and how far off the points are."""
    step = torch.where(step == 0, 1.0, step)
    numbers = ((groups - middle) / step).round_().add_(8).clamp_(0, 15)
    off = ((numbers - 8) * step + middle - groups).square_().sum(-1, keepdim=True)
    return numbers, torch.cat([step, middle], -1), off


class RoundedCopy:
    """A model's rounded copy; made once, with a progress bar."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.name = name
        layers = list(_linear_layers(model))
        head, twins = model.get_output_embeddings(), dict[nn.Module, nn.Module]()
        total = sum(layer.weight.numel() for layer in layers)
        with hf_logging.tqdm(total=total, desc="Rounding weights", **_BAR) as bar:
            for layer in layers:
                bits = 8 if layer is head else int(name.removeprefix("int"))
                twins[layer] = RoundedLinear(_values(layer.weight), layer.bias, bits)
                bar.update(layer.weight.numel())
        rounded = [twin for twin in twins.values() if isinstance(twin, RoundedLinear)]
        self.num_bytes = sum(twin.num_bytes for twin in rounded)
        self.run: Callable[..., Any] = bare_twin(model, twins)
        self.options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        self.worth = SourceWorth()  # of one forward
        self.hits = 1.0  # How often the token that it finds likeliest is the model's.

    def count(self, is_right: bool) -> None:
        self.hits += (is_right - self.hits) / _MEMORY


def rounded_copy(model: PreTrainedModel, name: str) -> RoundedCopy | str:
    """A model's copy, made on first use and tried once; or why it has none.

    It serves every `SelfSpec`. One of another name, device or dtype is made anew in its place.
    """
    if device_of(model).type != "cpu":
        return "its weights are not on a CPU"
    with _making:
        kind = name, model.dtype
        if model not in _copies or _copies[model][0] != kind:
            _copies.pop(model, None)  # The old one is free before there is a new one.
            _copies[model] = kind, _made(model, name)
        return _copies[model][1]


@torch.no_grad()
def _made(model: PreTrainedModel, name: str) -> RoundedCopy | str:
    in_layers = sum(layer.weight.numel() for layer in _linear_layers(model))
    if in_layers < _SHARE * sum(weight.numel() for weight in model.parameters()):
        return "most of its weights are in no linear layers"
    try:
        copy = RoundedCopy(model, name)
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        ids = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        copy.run(input_ids=ids, use_cache=True, **{KV: cache}, **copy.options)
    except Exception as error:  # Code of any family runs here over layers of ours.
        if is_out_of_memory(error):
            return "there is no memory for its rounded weights"
        return f"it can't be run: {type(error).__name__}: {error!s:.150}"
    return copy


def rounded_bytes(model: PreTrainedModel, name: str) -> int:
    """What a model's copy takes, without making it."""
    head, size = model.get_output_embeddings(), model.dtype.itemsize
    total = 0
    for layer in _linear_layers(model):
        num_rows = layer.out_features + -layer.out_features % _ROWS
        if name == "int8" or layer is head:
            total += num_rows * (layer.in_features + size)
        else:
            total += num_rows * layer.in_features // 2
            total += num_rows * layer.in_features // _GROUP * 2 * size
    return total


def _linear_layers(model: PreTrainedModel) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is not nn.Linear or module.in_features % _GROUP:
            continue
        if module.out_features >= _FEW:
            yield module


def _values(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight, which stays packed if it is."""
    packed = weight.packed if type(weight) is PackedWeight else None
    return weight.detach() if packed is None else packed.unpacked()


_making = threading.Lock()
_copies: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, RoundedCopy | str]]
_copies = WeakKeyDictionary()

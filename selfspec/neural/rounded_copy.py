"""A model's own weights, rounded, as a second tree of modules: it drafts for the model.

The copy shares every parameter and buffer with the model but the weights of linear layers. What a
user changes later in these makes its guesses worse, and no text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as hf_logging

from selfspec.compat.generation import KV
from selfspec.compat.kernels import is_out_of_memory
from selfspec.compat.modules import bare_twin
from selfspec.draft.sources.worth import SourceWorth
from selfspec.errors import UnsupportedError
from selfspec.forward.model import device_of, in_this_thread, takes
from selfspec.neural.draft_cursor import FULL_GAIN
from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.rounded import round_weight, rounding_reason
from selfspec.weights.rounded_model import can_be_rounded, rounded_bits, rounded_bytes
from selfspec.weights.streamed.loading import may_have_copy
from selfspec.weights.streamed.stream import FileWeight, is_streamed

_SHARE = 0.5  # At least this share of the weights must be in linear layers.
_BAR = {"unit_scale": True, "delay": 2.0}  # Seconds before it is shown.


class RoundedLinear(nn.Module):
    """A linear layer whose weight can be rounded to 8 bits, or to 4."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> None:
        super().__init__()
        matrix = round_weight(weight, bits)
        assert matrix is not None
        self.num_bytes = matrix.num_bytes
        self._matrix, self._bias = matrix, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(x, self._bias)


class RoundedCopy:
    """A model's rounded copy; made once, with a progress bar.

    Of a streamed model, the layers that stay in memory serve both.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._bits, self._head = int(name[-1]), model.get_output_embeddings()
        self._twins: dict[nn.Module, nn.Module] = {}
        modules = model.modules()
        streamed = [m for m in modules if any(type(x) is FileWeight for x in _weights(m))]
        parts = streamed or list(_linear_layers(model))
        total = sum(weight.numel() for part in parts for weight in _weights(part))
        with hf_logging.tqdm(total=total, desc="Rounding weights", **_BAR) as bar:
            self._bar = bar
            if streamed:
                self._visit(model, streamed)
            for part in parts:
                self._add(part)
        self.num_bytes = sum(map(_num_bytes, self._twins.values()))
        self.run: Callable[..., Any] = bare_twin(model, self._twins)
        self.options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        self.worth = SourceWorth(FULL_GAIN)
        del self._twins, self._bar

    def _visit(self, model: PreTrainedModel, modules: Sequence[nn.Module]) -> None:
        """Lets one forward show all modules of streamed layers, each while it has its weights."""
        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(in_this_thread(module.register_forward_pre_hook, self._add))
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="cpu"), use_cache=False)
        if unseen := set(modules) - self._twins.keys():
            raise UnsupportedError(f"a forward does not call its {type(unseen.pop()).__name__}")

    def _add(self, module: Any, *_: object) -> None:
        """Makes what stands for a module, whose weights have their values now."""
        if module in self._twins:
            return
        if can_be_rounded(module):
            bias = None if module.bias is None else _values(module.bias).clone()
            bits = 8 if module is self._head else self._bits
            self._twins[module] = RoundedLinear(_values(module.weight), bias, bits)
        else:
            twin = bare_twin(module, self._twins)
            for name, weight in module.named_parameters(recurse=False):
                setattr(twin, name, nn.Parameter(_values(weight).clone(), requires_grad=False))
        self._bar.update(sum(weight.numel() for weight in _weights(module)))


def rounded_copy(model: PreTrainedModel, name: str) -> RoundedCopy | str:
    """A model's copy, made on first use and tried once; or why it has none.

    It serves every `SelfSpec`. One of another name, device or dtype is made anew in its place.
    """
    if device_of(model).type != "cpu":
        return "its weights are not on a CPU"
    if reason := rounding_reason(int(name[-1])):
        return reason
    if is_streamed(model) and rounded_bits(model) is not None:
        return "its weights are rounded and streamed"
    if not may_have_copy(model):
        return "within max_memory, layers that stay in memory bring more than its rounded weights"
    with _making:
        kind = name, model.dtype
        if model not in _copies or _copies[model][0] != kind:
            _copies.pop(model, None)  # The old one is free before there is a new one.
            _copies[model] = kind, _made(model, name)
        return _copies[model][1]


@torch.no_grad()
def _made(model: PreTrainedModel, name: str) -> RoundedCopy | str:
    in_layers = sum(layer.weight.numel() for layer in _linear_layers(model))
    if in_layers < _SHARE * sum(weight.numel() for weight in model.get_decoder().parameters()):
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


def copy_bytes(model: PreTrainedModel, name: str) -> int:
    """Bytes that the copy of a model that is not streamed would take."""
    head = model.get_output_embeddings()
    return sum(
        rounded_bytes(layer, 8 if layer is head else int(name[-1]))
        for layer in _linear_layers(model)
    )


def _num_bytes(twin: nn.Module) -> int:
    if isinstance(twin, RoundedLinear):
        return twin.num_bytes
    return sum(weight.nbytes for weight in _weights(twin))


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _linear_layers(model: PreTrainedModel) -> Iterator[nn.Linear]:
    """The linear layers of the decoder and the head; parts that read images are not rounded."""
    parts = dict.fromkeys([*model.get_decoder().modules(), model.get_output_embeddings()])
    return filter(can_be_rounded, parts)


def _values(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight, which stays packed if it is."""
    packed = weight.packed if type(weight) is PackedWeight else None
    return weight.detach() if packed is None else packed.unpacked()


_making = threading.Lock()
_copies: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, RoundedCopy | str]]
_copies = WeakKeyDictionary()

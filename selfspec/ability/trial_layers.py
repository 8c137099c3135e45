"""How much of a model a trial runs: all layers, or only the first ones.

The first layer of each kind already shows whether a model follows masks and positions, and these
layers take a small part of a forward's time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.ability.look import look_at
from selfspec.forward.model import AttentionTypes, device_of, in_this_thread
from selfspec.weights.streamed.stream import is_streamed


class _Reached(Exception):
    """Ends a forward after a layer; carries what that layer returned."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class TrialLayers:
    """The layer after which forwards end, and how many layers are run; None for all."""

    last_layer: nn.Module | None = None
    num_layers: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> TrialLayers:
        """The first layers of this model that include all kinds; all layers if these are unknown.

        All layers are run if the model is compiled or foreign code runs in it, since that code may
        expect whole forwards, and if the model runs layers several times. To find out takes a
        plain step.
        """
        if model.config.is_encoder_decoder:  # Its layers are in two parts.
            return cls()
        config, layers = model.config.get_text_config(decoder=True), layers_of(model)
        shares_kv = getattr(config, "num_kv_shared_layers", None)
        if layers is None or shares_kv:
            return cls()
        look = look_at(model)
        if look.foreign or any(look.compiled) or look.scattered_reason():
            return cls()
        forms = forms_of(model, layers)
        needed = max(forms.index(form) + 1 for form in forms)
        # A whole forward of a streamed model reads all of it from disk.
        if needed == len(layers) or not (is_streamed(model) or _run_once(model, layers)):
            return cls()
        return cls(layers[needed - 1], needed)

    def output(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a forward (B, Q, D): the logits, or the output of `last_layer`."""
        if self.last_layer is None:
            return forward()
        try:
            with in_this_thread(self.last_layer.register_forward_hook, _stop):
                forward()
        except _Reached as reached:
            return reached.hidden
        raise RuntimeError("the forward did not run its layers")

    def types(self, attention: AttentionTypes) -> AttentionTypes:
        by_layer = attention.by_layer[: self.num_layers]
        states = frozenset(index for index in attention.states if index < len(by_layer))
        return attention._replace(by_layer=by_layer, states=states)

    def cut(self, cache: Any) -> None:
        del cache.layers[self.num_layers or len(cache.layers) :]


def layers_of(model: PreTrainedModel) -> nn.ModuleList | None:
    """The model's list of decoder layers; None if there are several such lists, or none."""
    config = model.config.get_text_config(decoder=True)
    number = int(getattr(config, "num_hidden_layers", 0))
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == number]
    return lists[0] if len(lists) == 1 else None


def _run_once(model: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Does a forward run these layers once, one after the other?"""
    ran: list[nn.Module] = []

    def note(layer: nn.Module, *_: Any) -> None:
        ran.append(layer)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(in_this_thread(layer.register_forward_hook, note))
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(model)))
    return ran == list(layers)


def forms_of(model: PreTrainedModel, layers: nn.ModuleList) -> list[Hashable]:
    """The forms of the layers: the classes in them, and what the config's lists say about them."""
    config = model.config.get_text_config(decoder=True)
    listed = [
        value
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == len(layers)
    ]
    return [
        (tuple(type(module) for module in layer.modules()), *(repr(values[i]) for values in listed))
        for i, layer in enumerate(layers)
    ]


def _stop(_module: Any, _args: Any, output: Any) -> None:
    raise _Reached(output if isinstance(output, torch.Tensor) else output[0])

"""A forward over fixed KV slots, as a capture records it.

Knows one model and one short prompt; nothing of questions or tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from eval.errors import EvalError
from selfspec import SelfSpec
from selfspec.ability.trial_layers import layers_of
from selfspec.compat.generation import KV
from selfspec.cuda.runner import StaticRunner
from selfspec.forward.backends import TreeBackend
from selfspec.machine.device import Device, Replay, device_for
from selfspec.records import DraftTree


class Repeating(Device):
    """Runs again what it is asked to capture."""

    def capture(self, work: Callable[[], None]) -> Replay | str:
        return work


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of a model whose forwards can be captured; refuses any other."""
    support, layers = SelfSpec().support(model), layers_of(model)
    if support.attention is None or layers is None:
        reason = support.reason or "its layers are in several lists"
        raise EvalError(f"--model must be one whose forwards can be captured ({reason})")
    return layers


@torch.no_grad()
def fixed_forward(
    model: Any, width: int, num_tokens: int, *, captures: bool
) -> Callable[[], torch.Tensor]:
    """A forward of a chain of `width` nodes after a prompt, in fixed slots; it can be repeated.

    With `captures` it is a replay if the device can; refuses what can't be had. It has run once,
    which made all that lasts.
    """
    attention = SelfSpec().support(model).attention
    assert attention is not None
    ids = torch.arange(num_tokens, device=model.device)[None] % model.config.vocab_size
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{KV: cache})
    device = device_for(model.device)
    device = device if captures and device.can_capture else Repeating()
    forwards = StaticRunner(attention, device, model.device)
    backend = TreeBackend(model, attention, forwards)
    rows = backend.add(cache, torch.full((1, 1), num_tokens, device=model.device))
    tree = DraftTree.of_root(0)
    for node in range(1, width):
        tree.add(node - 1, node, 1.0)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return backend.lay_out(rows, [tree])()

    forward()
    if forwards.reason:
        raise EvalError(f"its forwards can't be run so: {forwards.reason}")
    return forward

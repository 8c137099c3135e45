"""What a model itself says: its logits, where it computes, its layers' attention types."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from selfspec.attention import grouped_attention
from selfspec.compat.generation import KV
from selfspec.compat.modules import embeddings_of, execution_device
from selfspec.forward.layout import Layout, Window
from selfspec.forward.states.slots import States
from selfspec.forward.states.swapped_functions import Function, branching
from selfspec.weights.rounded import products_of_a_step

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

Logits = Callable[[], torch.Tensor]  # Runs a forward and gives its logits (B, Q, V).
# The types of layers that keep states and have no attention. Their masks hide padding of a prompt.
STATE_TYPES = ("linear_attention", "conv")


class AttentionTypes(NamedTuple):
    """The attention types of the layers, their windows, and where scales change.

    `scale_period` is 0 for all models but Llama 4. That one scales a query by the block of
    `scale_period` columns that it is in, and takes its column from the length of the KV.

    Layers may keep running states, beside attention or without it: those whose numbers are in
    `states`. A layer without attention has no type. `functions` move the states on.
    """

    by_layer: tuple[str | None, ...]
    windows: dict[str, Window]
    scale_period: int
    states: frozenset[int] = frozenset()
    functions: tuple[Function, ...] = ()

    @property
    def reading_reason(self) -> str | None:
        """Why a copy of the model can't read drafts on the model's slots; None if it can."""
        if self.states:
            return "the model keeps running states"
        if any(window.form == "chunked" for window in self.windows.values()):
            return "the model attends within chunks"
        return None


class EagerForwards(NamedTuple):
    """How forwards are run that are not captured, as `GenerationStats` tells it."""

    name: str = "eager"  # Or "packed" or "streamed".
    reason: str | None = None  # Why they are not run as the config asks.
    packing_note: str | None = None  # What packing the weights would bring; None if nothing.


def device_of(model: PreTrainedModel) -> torch.device:
    """The model's device; for one that accelerate offloads, the device that its hooks run it on.

    The first weights of such a model may have no values before its forward, and then `model.device`
    is ``meta``.
    """
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return execution_device(model) or device


@contextmanager
def in_this_thread(register: Callable[..., Any], act: Callable[..., Any]) -> Iterator[None]:
    """Inside, a hook of a module acts; not in other threads, which may run the same model."""
    owner = threading.get_ident()

    def hook(*args: Any) -> Any:
        return act(*args) if threading.get_ident() == owner else None

    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def at_output_head(
    model: PreTrainedModel, on_states: Callable[[torch.Tensor], torch.Tensor | None]
) -> AbstractContextManager[None]:
    """Inside, `on_states` gets what enters the output head in this thread's forwards.

    What it returns, if anything, enters the head instead.
    """

    def at_head(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        instead = on_states(args[0]) if args else None
        return None if instead is None else (instead, *args[1:])

    return in_this_thread(model.get_output_embeddings().register_forward_pre_hook, at_head)


class HeadOutputs(NamedTuple):
    """What the output head gave in one forward, and what it got."""

    logits: torch.Tensor  # (B, Q, V)
    states: torch.Tensor | None = None  # (B, Q, D): what entered the output head, where asked for


def run_forward(model: PreTrainedModel, run: Logits, *, with_states: bool) -> HeadOutputs:
    """Runs a forward, and keeps what enters the output head."""
    if not with_states:
        return HeadOutputs(run())
    states: list[torch.Tensor] = []
    with at_output_head(model, states.append):
        logits = run()
    return HeadOutputs(logits, states[-1][:, -logits.shape[1] :] if states else None)


def num_readable(model: PreTrainedModel) -> int:
    """How many token ids the model can read; its head may name fewer, or more."""
    number = getattr(embeddings_of(model), "num_embeddings", None)
    return vocab_size(model) if number is None else int(number)


def max_positions(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def vocab_size(model: PreTrainedModel) -> int:
    """The width of its logits, which may be padded beyond the tokenizer's vocabulary."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def logits_of(
    model: PreTrainedModel,
    layout: Layout,
    cache: Cache,
    states: States,
    functions: Sequence[Function],
) -> torch.Tensor:
    """The logits (B, Q, V) of one forward of the model over trees."""
    masks = layout.masks
    if functions and len(masks) > 1:
        masks = {**masks, **dict.fromkeys(STATE_TYPES)}
    positions = {"position_ids": layout.position_ids} if masks else {}  # Attention alone has any.
    branches = branching(states, layout.ancestry, functions) if functions else nullcontext()
    with grouped_attention(), products_of_a_step(), branches:
        output = model(
            input_ids=layout.input_ids,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values()), None),
            **positions,
            use_cache=True,
            **{KV: cache},
            return_dict=True,
        )
    return output.logits  # type: ignore[no-any-return]

"""Decoder layers that torch has compiled, inside captured forwards.

Layers of one form are compiled once. So that nothing which is traced depends on a layer's number,
a layer is called with its own keys and values as its cache. Small kernels are most of a small
model's time on a card, and a compiled layer has fewer of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from selfspec.ability.readings import prefilled
from selfspec.ability.trial_layers import TrialLayers, forms_of, layers_of
from selfspec.ability.trials import tree_of
from selfspec.compat.compilers import compiled, missing_compiler, tracing
from selfspec.compat.generation import decoding_switches
from selfspec.compat.kernels import is_out_of_memory
from selfspec.forward.backends import TreeBackend
from selfspec.forward.layout import Layout
from selfspec.forward.model import AttentionTypes, num_readable
from selfspec.forward.sizes import Limits, Policy
from selfspec.forward.tree_kv import TreeKV

_log = logging.getLogger("selfspec")

_WIDTHS = (16, 1)  # Of the trial's forwards; they are two graphs.
_PROMPT = 12  # Tokens of the trial's prompt.
# A layer's rounding may differ by this many times what its own differs from width to width, or by
# this many steps of the dtype where it does not differ at all.
_TIMES, _STEPS = 4.0, 32.0


class LayerKV:
    """The keys and values of one layer in one forward, as its attention sees a cache."""

    def __init__(self, layer: Any, layout: Layout) -> None:
        end = layout.num_keys(layer.attention_type)
        self.keys = layer.stores["keys"][:, :, :end]
        self.values = layer.stores["values"][:, :, :end]
        self._slots = layout.slots[layer.attention_type]
        self._front = layout.front

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the nodes' keys and values to their slots, and gives all that a query may see."""
        self.keys.index_copy_(2, self._slots, key_states)
        self.values.index_copy_(2, self._slots, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        """How many columns are in front of the tree."""
        return self._front


class CompiledLayers:
    """A model's layers; those of one form are compiled when a forward first runs one of them.

    A form that breaks the graph stays as it is; `reason` says why.
    """

    def __init__(self, layers: nn.ModuleList, forms: list[Hashable]) -> None:
        self.reason: str | None = None
        self._layers = layers
        self._forms = forms
        self._broken: set[Hashable] = set()

    @classmethod
    def of(cls, model: Any) -> CompiledLayers | str:
        """Those of a model, or why it has none."""
        if missing := missing_compiler(model.device):
            return missing
        if (layers := layers_of(model)) is None:
            return "its layers are in several lists"
        return cls(layers, forms_of(model, layers))

    @property
    def is_of_use(self) -> bool:
        """Is there a form that is compiled, or may be?"""
        return not self._broken.issuperset(self._forms)

    @contextmanager
    def running(self, kv: TreeKV) -> Iterator[None]:
        """Inside, this thread's forwards over `kv` run compiled layers."""
        layout = kv.forward.layout
        assert layout is not None
        before = [vars(layer).get("forward") for layer in self._layers]
        owner = threading.get_ident()
        for index, layer in enumerate(self._layers):
            caches = kv.cache, LayerKV(kv.cache.layers[index], layout)
            layer.forward = partial(self._run, owner, index, layer.forward, caches)
        try:
            yield
        finally:
            for layer, forward_before in zip(self._layers, before, strict=True):
                if forward_before is None:
                    del layer.forward
                else:
                    layer.forward = forward_before

    def _run(
        self,
        owner: int,
        index: int,
        stock: Callable[..., Any],
        caches: tuple[Any, LayerKV],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A layer's forward, compiled with its own keys and values in place of the whole cache."""
        layer, form, (whole, layer_kv) = self._layers[index], self._forms[index], caches
        of: Any = type(layer)
        if form in self._broken or threading.get_ident() != owner:
            return stock(*args, **kwargs)
        swapped = [layer_kv if arg is whole else arg for arg in args]
        named = {name: layer_kv if arg is whole else arg for name, arg in kwargs.items()}
        try:
            return run_compiled(_of_class(of), layer, *swapped, **named)
        except Exception as error:  # Code that can't be traced may raise anything.
            if is_out_of_memory(error):
                raise
            self._broken.add(form)
            said = " ".join(str(error).splitlines()[:2]) or type(error).__name__
            self.reason = f"compiling its {type(layer).__name__} fails: {said}"
            return stock(*args, **kwargs)


def run_compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One call of a compiled layer; the only place where compiled code runs."""
    with tracing():
        return function(*args, **kwargs)


@cache
def _of_class(layer_class: Any) -> Callable[..., Any]:
    """The compiled forward of a class of layers; torch keeps a graph for every form of them."""
    stock: Callable[..., Any] = layer_class.forward

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(layer, *args, **kwargs)

    return compiled(forward)


def compile_layers(
    model: Any, attention: AttentionTypes, runner: Any, limits: Limits | None
) -> None:
    """Lets a runner that no call uses run compiled layers, or tells it why it must not."""
    start = perf_counter()
    try:
        with decoding_switches(model), torch.no_grad():
            refused = _trial(model, attention, runner, limits)
    except Exception as error:  # Forwards are captured as they were before.
        refused = f"trying them fails ({type(error).__name__})"
    _log.info("compiling layers took %.1f s", perf_counter() - start)
    if refused is not None:
        runner.use(refused)


def _trial(model: Any, attention: AttentionTypes, runner: Any, limits: Limits | None) -> str | None:
    """Runs compiled layers for the first time; returns why they must not be used, if so.

    Where rows come and go, what several rows need is compiled too. Logits may differ from those of
    the layers as they are by about as much as these differ between forwards of two widths.
    """
    if attention.states:
        return "they keep running states, which a compiled layer would not show"
    layers = CompiledLayers.of(model)
    if isinstance(layers, str):
        return layers
    stock = _chains(model, attention, runner, limits)
    runner.use(layers)
    ours = _chains(model, attention, runner, limits)
    if runner.reason or not layers.is_of_use:
        return runner.reason or layers.reason
    wide, narrow, *_ = stock
    noise = (wide[:, : narrow.shape[1]] - narrow).abs().max()
    step = torch.finfo(wide.dtype).eps * wide.abs().max()
    allowed = torch.maximum(_TIMES * noise, _STEPS * step)
    far = torch.stack([(a - b).abs().max() for a, b in zip(stock, ours, strict=True)]).max()
    if bool(far <= allowed):  # False for NaN, too.
        return None
    return f"its compiled layers differ from its own by {far:.2g}, where {allowed:.2g} is rounding"


def _chains(
    model: Any, attention: AttentionTypes, runner: Any, limits: Limits | None
) -> list[torch.Tensor]:
    """The logits (B, W, V) of chains of each width after short prompts, of one row and of two."""
    tokens = [token % num_readable(model) for token in range(max(_PROMPT, *_WIDTHS))]
    outcomes: list[torch.Tensor] = []
    for num_rows in range(1, min(2, 1 if limits is None else limits.max_rows) + 1):
        kv = prefilled(model, tokens[:_PROMPT], TrialLayers(), num_rows)
        positions = torch.tensor([[_PROMPT]] * num_rows, device=model.device)
        runner.kv.policy = Policy(limits, is_fixed=True)
        backend = TreeBackend(model, attention, runner)
        rows = backend.add(kv, positions, max_columns=_PROMPT + max(_WIDTHS))
        for width in _WIDTHS:
            chain = tree_of(tokens[0], (), tokens[1:width])
            run = backend.lay_out(rows, [chain] * num_rows)
            outcomes.append(backend.forward(run).logits.clone())
        runner.check_memory()
    return outcomes

"""How many operations a captured forward starts, in each layer and around the layers.

    python -m eval launches --model PATH --width 1 8

On a card, small kernels are most of the time of a small model, and each operation that is no view
is a kernel or more. They are counted in a forward over fixed KV slots, as a capture would record
it, so any machine can count them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from eval.errors import EvalError
from eval.models.loading import load_asked
from eval.options import add_model
from eval.report.table import Table
from eval.runs.environment import told, where
from selfspec import SelfSpec
from selfspec.ability.trial_layers import layers_of
from selfspec.compat.generation import KV
from selfspec.cuda.runner import StaticRunner
from selfspec.forward.backends import TreeBackend
from selfspec.forward.model import AttentionTypes
from selfspec.machine.device import Device
from selfspec.records import DraftTree

_PROMPT_TOKENS = 16
_AROUND = "around"
_COLUMNS = {
    "width": "{width}",
    "a layer": "{layer}",
    "the dearest layer": "{dearest}",
    "around the layers": "{around}",
    "all": "{all}",
    "in a layer": "{in_layer}",
}


class Launches(TorchDispatchMode):
    """Counts operations that are no views by name, apart for each place that `inside` names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Counter[str]] = {_AROUND: Counter()}
        self._place = _AROUND

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _launches(func, (args, kwargs), out):
            self.counts[self._place][func.overloadpacket.__name__] += 1
        return out

    @contextmanager
    def inside(self, layers: nn.ModuleList) -> Iterator[None]:
        """Inside, what each of these layers starts is counted apart."""

        def enter(place: str) -> None:
            self._place = place
            self.counts.setdefault(place, Counter())

        handles = []
        for index, layer in enumerate(layers):
            name = str(index)
            handles.append(layer.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            handles.append(layer.register_forward_hook(lambda *_: enter(_AROUND)))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def _launches(func: Any, inputs: Any, out: Any) -> bool:
    """Does it compute or write anything? Memory that nobody fills costs no kernel."""
    if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
        return False
    held = {_memory(each) for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)}
    made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    return bool(func._schema.is_mutable) or any(_memory(each) not in held for each in made)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def run(options: argparse.Namespace) -> int:
    """Counts a forward of each width, and prints a table and the JSON line."""
    model = load_asked(options)
    rows = launches(model, options.width)
    title = "Operations of a captured forward that are no views"
    note = "A layer is the median one; the first of a kind also makes what the others share."
    print(Table.of(title, _COLUMNS, rows, note).markdown())
    print(json.dumps(told("launches", options, **where(model), rows=rows)))
    return 0


def launches(model: Any, widths: list[int]) -> list[dict[str, Any]]:
    """What forwards of these widths start; refuses a model that no capture can run."""
    ability, layers = SelfSpec().ability(model), layers_of(model)
    if ability.attention is None or layers is None:
        reason = ability.reason or "its layers are in several lists"
        raise EvalError(f"--model must be one whose forwards can be captured ({reason})")
    return [_counted(model, layers, ability.attention, width) for width in widths]


@torch.no_grad()
def _counted(
    model: Any, layers: nn.ModuleList, attention: AttentionTypes, width: int
) -> dict[str, Any]:
    backend, tree = static_backend(model, attention, width), DraftTree.of_root(0)
    for node in range(1, width):
        tree.add(node - 1, node, 1.0)
    backend.forward(backend.lay_out([tree]))  # This makes what lasts.
    counted, forward = Launches(), backend.lay_out([tree])
    with counted.inside(layers):
        backend.forward(forward)
    around = counted.counts.pop(_AROUND)
    layers_by_cost = sorted(counted.counts.values(), key=Counter.total)
    usual, dearest = layers_by_cost[(len(layers) - 1) // 2], layers_by_cost[-1]
    return {
        "width": width,
        "layer": usual.total(),
        "dearest": dearest.total(),
        "around": around.total(),
        "all": around.total() + sum(each.total() for each in counted.counts.values()),
        "in_layer": ", ".join(f"{number} {name}" for name, number in usual.most_common()),
        "in_around": dict(around.most_common()),
    }


def static_backend(model: Any, attention: AttentionTypes, width: int) -> TreeBackend:
    """One short prompt in fixed slots, on a device that captures nothing."""
    ids = torch.arange(_PROMPT_TOKENS, device=model.device)[None]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=ids, use_cache=True, **{KV: cache})
    forwards = StaticRunner(attention, Device(), model.device)
    backend = TreeBackend(model, attention, forwards)
    backend.add(cache, ids[:, -1:] + 1, columns_now=256, max_tree=width)
    return backend


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, dtype="float32", device="cpu")
    parser.add_argument(
        "--width", nargs="+", type=int, default=[1, 8], metavar="N", help="default: 1 8"
    )

"""The functions of transformers that move running states on, as modelling files call them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from inspect import unwrap
from types import FunctionType, ModuleType

from torch import nn

# What each function does, by its name in the module that defines a layer. A name that is gone
# means that its models get chains in place of trees.
ROLES = {
    "causal_conv1d_fn": "convolution",
    "causal_conv1d_update": "convolution step",
    "chunk_kimi_delta_attention": "delta rule",
    "mamba2_chunk_scan": "scan",
    "mamba2_selective_state_update": "scan step",
    "recurrent_kimi_delta_attention": "delta rule",
    "torch_chunk_gated_delta_rule": "delta rule",
    "torch_recurrent_gated_delta_rule": "delta rule",
}


def state_functions(modules: Iterable[nn.Module]) -> tuple[tuple[ModuleType, str], ...]:
    """The Python modules that define the layers of a model, with such functions in them."""
    return tuple(dict.fromkeys(_state_functions(modules)))


def calls_state_functions(owner: type) -> bool:
    """Does a method of this class call such a function, so that its layers keep running states?"""
    methods = (unwrap(x) for x in vars(owner).values() if isinstance(x, FunctionType))
    names = (name for method in methods for name in method.__code__.co_names)
    return any(name in ROLES for name in names)


def _state_functions(modules: Iterable[nn.Module]) -> Iterator[tuple[ModuleType, str]]:
    for name in {type(part).__module__ for part in modules}:
        module = sys.modules.get(name)
        for function in ROLES:
            if module is not None and callable(vars(module).get(function)):
                yield module, function

"""Who wrote the code that runs in a model: by the modules that functions and classes come from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

from selfspec.compat.generation import is_of_output_capturing

# The modules of these packages are parts of models: layers, quantised ones among them, adapters,
# and faster kernels. Anybody else's was put there by the model's user, or came with its files.
_LIBRARIES = frozenset(
    (
        "accelerate",
        "auto_gptq",
        "auto_round",
        "awq",
        "bitsandbytes",
        "causal_conv1d",
        "compressed_tensors",
        "fla",
        "flash_attn",
        "gptqmodel",
        "hqq",
        "kernels",
        "liger_kernel",
        "mamba_ssm",
        "optimum",
        "peft",
        "selfspec",
        "timm",
        "torch",
        "torchao",
        "transformers",
        "trl",
        "xformers",
    )
)
# Hooks of these modules move weights, or mask them.
_HARMLESS = ("accelerate.hooks", "torch.nn.utils.prune", "torch.nn.utils.weight_norm")
# Gradient checkpointing puts this on embeddings.
_REQUIRES_GRAD = "make_inputs_require_grads"
# The attributes in which a wrapper may hold the function inside.
_INSIDE = ("func", "__func__", "__wrapped__", "_torchdynamo_orig_callable")


def _parts(code: Any) -> Iterator[Any]:
    """The functions and objects that a callable consists of: a wrapper, and what it wraps.

    trl's GRPO puts a function around a model's forward, and its `__wrapped__` is another one. If it
    changes, GRPO's generation is as before, but a user's forward inside of trl's is not found.
    """
    waiting, seen = [code], set[int]()
    for part in waiting:  # It grows meanwhile.
        if id(part) not in seen:
            seen.add(id(part))
            waiting += [getattr(part, name) for name in _INSIDE if hasattr(part, name)]
            if isinstance(part, FunctionType) and _origin(part).partition(".")[0] == "trl":
                contents = (cell.cell_contents for cell in part.__closure__ or ())
                waiting += [inside for inside in contents if callable(inside)]
            if not isinstance(part, (partial, MethodType)):
                yield part


def _origin(part: Any) -> str:
    # `functools.wraps` gives a wrapper the module of what is inside, but not its globals.
    if isinstance(part, FunctionType):
        return str(part.__globals__.get("__name__", ""))
    owner = part if isinstance(part, (type, BuiltinFunctionType)) else type(part)
    return str(owner.__module__ or "")


def name_of(code: Any) -> str:
    """The name that the author gave to a hook or a forward: that of the innermost wrapped one."""
    *_, part = _parts(code)
    name = str(getattr(part, "__qualname__", None) or type(part).__qualname__)
    return name.rpartition("<locals>.")[2]


def functions_of(code: Any) -> Hashable:
    """The same value for two callables that run the same code, such as closures made in a loop."""
    return tuple(getattr(part, "__code__", None) or name_of(part) for part in _parts(code))


def is_of_library(code: Any) -> bool:
    """Was all of this written by libraries whose modules are parts of models?

    >>> is_of_library(nn.Linear), is_of_library(len)
    (True, False)
    """
    return all(_origin(part).partition(".")[0] in _LIBRARIES for part in _parts(code))


def is_harmless(hook: Any) -> bool:
    """Is this a hook or a forward of ours, or a library's that changes no token in a plain call?

    Without it, such a hook makes the trial of a model longer, and its prompts are not kept.
    """
    origin, *inside = map(_origin, _parts(hook))
    package = origin.partition(".")[0]
    if package == "selfspec":
        return is_of_library(hook)
    if inside:
        return False
    if package == "transformers" and getattr(hook, "__name__", "") == _REQUIRES_GRAD:
        return True
    return origin in _HARMLESS or is_of_output_capturing(origin)


def layer_that_mixes_tokens(module: nn.Module) -> str | None:
    """The name of a layer whose result for a token depends on the other tokens of the forward.

    LLM.int8 of bitsandbytes computes a column in half precision if any token of the forward has a
    large value there. Without this, a trial without such a token would pass, and a text could
    differ from stock's.
    """
    if type(module).__name__ != "Linear8bitLt":
        return None
    threshold = getattr(getattr(module, "state", None), "threshold", 0)
    return f"{type(module).__name__} of bitsandbytes" if threshold > 0 else None

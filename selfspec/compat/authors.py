"""Who wrote the code that runs in a model: by the modules that functions and classes come from."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from functools import cache, lru_cache, partial
from operator import is_
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from huggingface_hub import constants
from torch import nn
from transformers import cache_utils

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
# Hooks of these modules move weights, mask them, or act only if a caller wants hidden states.
_HARMLESS = frozenset(
    (
        "accelerate.hooks",
        "torch.nn.utils.prune",
        "torch.nn.utils.weight_norm",
        "transformers.utils.output_capturing",
    )
)
# Gradient checkpointing puts this on embeddings.
_REQUIRES_GRAD = "make_inputs_require_grads"
# Modules whose functions run in forwards, beside those that define a model's classes.
_OF_FORWARDS = (
    "torch.nn.functional",
    "transformers.cache_utils",
    "transformers.integrations.flash_attention",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_flash_attention_utils",
)
# Methods of models that call forwards, and that no forward calls.
NOT_IN_STEPS = frozenset(
    ("__init__", "from_pretrained", "generate", "generate_batch", "save_pretrained")
)
# `torch.compile` puts what it has made into the modules of what it compiles, and calls it alone.
_OF_DYNAMO = ("__compiled_fn_", "__resume_at_")
_MOST_KNOWN = 2048  # The most modules and classes whose functions are remembered.
# The attributes in which a wrapper may hold the function inside; `replaced_function` is of ours.
_INSIDE = (
    "func",
    "fget",
    "__func__",
    "__wrapped__",
    "_torchdynamo_orig_callable",
    "replaced_function",
)
# Modules of torch whose code is made from somebody else's.
_OF_ANYBODY = (torch.jit.ScriptModule, torch.fx.GraphModule)
_MOST_PARTS = 32  # A mock has every attribute, and so parts without end.

Replaced = tuple[str, Any]  # A function, and the place in a library where somebody has put it.


def _parts(code: Any) -> Iterator[Any]:
    """The functions and objects that a callable consists of: a wrapper, and what it wraps.

    Functions that torch has scripted, and its operators, count as torch's.
    """
    waiting, seen = [code], set[int]()
    for part in waiting:  # The list grows while it is walked.
        if id(part) not in seen and len(seen) < _MOST_PARTS:
            seen.add(id(part))
            if isinstance(part, MethodType):  # An autograd.Function's `apply` calls its class.
                waiting.append(_class_of(part.__self__))
            waiting += [getattr(part, name) for name in _INSIDE if hasattr(part, name)]
            if isinstance(part, partial):
                waiting += filter(callable, (*part.args, *part.keywords.values()))
            if not isinstance(part, (partial, MethodType)):
                yield part


def _origin(part: Any) -> str:
    # `functools.wraps` gives a wrapper the module of what is inside, but not its globals.
    if isinstance(part, FunctionType):
        return str(part.__globals__.get("__name__", ""))
    owner = part if isinstance(part, BuiltinFunctionType) else _class_of(part)
    if isinstance(owner, type) and issubclass(owner, _OF_ANYBODY):
        return ""
    return str(owner.__module__ or "builtins")


def _class_of(part: Any) -> type:
    return part if isinstance(part, type) else type(part)


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
    return all(_is_library(_origin(part).partition(".")[0]) for part in _parts(code))


@cache
def _is_library(package: str) -> bool:
    """Is this a library of the list, or a kernel that the package `kernels` runs from its cache?

    Without the second, a model that is loaded with `use_kernels=True` is decoded plainly.
    """
    is_kernel = any(path.is_relative_to(constants.HF_HUB_CACHE) for path in _paths_of(package))
    return package in _LIBRARIES or is_kernel


def _paths_of(package: str) -> list[Path]:
    """The folders of a package, or the file of a module."""
    spec = getattr(sys.modules.get(package), "__spec__", None)
    paths = (spec.submodule_search_locations or [spec.origin or ""]) if spec else []
    return list(map(Path, paths))


def replaced_functions(classes: Iterable[type[nn.Module]]) -> list[Replaced]:
    """The functions of no library that modules and classes of libraries hold, with their places.

    Looked for once in a module or class, and again where anything in it has changed or was
    replaced. To see that nothing has takes 0.15 ms.
    """
    return [replaced for owner in _owners(frozenset(classes)) for replaced in _replaced_in(owner)]


@lru_cache(maxsize=64)
def _owners(classes: frozenset[type]) -> list[Any]:
    """The classes and modules whose functions the forwards of these classes call."""
    bases = {base for owner in classes for base in owner.__mro__ if is_of_library(base)}
    bases.update(part for part in vars(cache_utils).values() if isinstance(part, type))
    of_classes = {base.__module__ for base in bases}
    # The module of `torch.compile`'s wrapper has mocks of its own, and no function of a forward.
    names = {*_OF_FORWARDS, *(name for name in of_classes if not name.startswith("torch._dynamo."))}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [*modules, *sorted(bases, key=_name_in_full)]


# What a module or a class held when no function in it was replaced.
_known: dict[Any, list[Any]] = {}


def _replaced_in(owner: Any) -> list[Replaced]:
    values, contents = _known.get(owner, ()), dict(vars(owner))
    if len(contents) == len(values) and all(map(is_, contents.values(), values)):
        return []
    replaced = [
        (f"{_name_in_full(owner)}.{name}", value)
        for name, value in contents.items()
        if name not in NOT_IN_STEPS and not name.startswith(_OF_DYNAMO) and not _is_installed(value)
    ]
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known.pop(owner, None)
    if not replaced:  # Nobody's function is kept longer than by its user.
        _known[owner] = list(contents.values())
    return replaced


def _name_in_full(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def _is_installed(value: Any) -> bool:
    """Is this value no code, or code of Python or of an installed package?"""
    is_code = callable(value) or hasattr(type(value), "__get__")  # A property has `__get__`.
    origins = map(_origin, _parts(value)) if is_code else ()
    return all(_is_package(origin.partition(".")[0]) for origin in origins)


@cache
def _is_package(name: str) -> bool:
    """Is this a package of Python, or was it installed, so that a description lies beside it?"""
    is_python = name in sys.stdlib_module_names and name != "unittest"  # Mocks are a user's.
    if is_python or _is_library(name):
        return True
    return any(any(path.parent.glob("*.dist-info")) for path in _paths_of(name))


def is_harmless(hook: Any) -> bool:
    """Is this a hook or a forward of ours, or a library's that changes no token in a plain call?

    Without it, such a hook makes the trial of a model longer, and its prompts are not kept.
    """
    origins = list(map(_origin, _parts(hook)))
    package = origins[0].partition(".")[0]
    if package == "selfspec":
        return is_of_library(hook)
    if package == "transformers" and getattr(hook, "__name__", "") == _REQUIRES_GRAD:
        return len(origins) == 1
    return _HARMLESS.issuperset(origins)


def layer_that_mixes_tokens(module: nn.Module) -> str | None:
    """The name of a layer whose result for a token depends on the other tokens of the forward.

    LLM.int8 of bitsandbytes computes a column in half precision if any token of the forward has a
    large value there. Without this, a trial without such a token would pass, and a text could
    differ from transformers'.
    """
    if type(module).__name__ != "Linear8bitLt":
        return None
    threshold = getattr(getattr(module, "state", None), "threshold", 0)
    return f"{type(module).__name__} of bitsandbytes" if threshold > 0 else None

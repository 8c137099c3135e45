"""Where other people's code runs in a model's forward.

The layers and hooks of libraries are parts of a model. Hooks, wrapper modules, replaced functions,
attention and model classes of anybody else may do anything: act by a switch or a counter, or on
long forwards alone. No trial shows what they will do, and a trial is one more forward that they
see. So a model in which they run is drafted for only on its user's word. Knows modules; runs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from types import MethodType
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from selfspec.compat.authors import (
    NOT_IN_STEPS,
    functions_of,
    is_harmless,
    is_of_library,
    name_of,
    replaced_functions,
)
from selfspec.compat.generation import functions_by_name
from selfspec.compat.modules import (
    Modules,
    accelerate_hooks,
    hooks_of_all,
    hooks_on,
    is_compiled,
)


class ForeignCode(NamedTuple):
    """A place where code runs that is no layer of a library.

    `code` is the same for another closure of the same function in the same place.
    """

    what: str
    is_of_library: bool
    code: Hashable


def foreign_code(model: PreTrainedModel, modules: Modules) -> tuple[ForeignCode, ...]:
    """All code in the forward of a model with these modules that is no layer of a library.

    Leaves out what is known to change no token: hooks of accelerate, `torch.compile`, and hooks
    that gradient checkpointing needs. A class is named once, where it is first.
    """
    return tuple(
        ForeignCode(what, is_of_library(code), (what, functions_of(code)))
        for what, code in _foreign_code(model, modules)
    )


def distrusted(foreign: Iterable[ForeignCode]) -> str | None:
    """Why a model is not tried: whose code runs in it, and what to do. None if it may be tried."""
    for code in foreign:
        if not code.is_of_library:
            return (
                f"{code.what}, which is not tried, since it may treat drafts otherwise than plain "
                "steps; if it does not, use SelfSpec(trust_hooks=True)"
            )
    return None


def _foreign_code(model: PreTrainedModel, modules: Modules) -> Iterator[tuple[str, Any]]:
    for hook in hooks_of_all().values():
        if not is_harmless(hook):
            yield f"all modules have the hook {name_of(hook)!r}", hook
    for place, function in replaced_functions(modules.classes):
        yield f"{place} is {name_of(function)!r} now", function
    for owner, name in modules.classes.items():
        if not is_of_library(owner):
            yield f"{_where(name)} is a {owner.__module__}.{owner.__qualname__}", owner
    for kind in dict.fromkeys(map(type, modules.tensors)):  # Its class may answer torch.
        if not is_of_library(kind):
            yield f"one of its weights is a {kind.__module__}.{kind.__qualname__}", kind
    for name, module in modules.hooked:
        yield from _on_module(module, _where(name))
    for what, code in functions_by_name(model).items():
        if not is_of_library(code):
            yield f"it has the {what}, {name_of(code)!r}", code


def _where(name: str) -> str:
    return f"its module {name!r}" if name else "it"


def _on_module(module: nn.Module, where: str) -> Iterator[tuple[str, Any]]:
    """The hooks of one module, and the functions that stand in the place of its methods."""
    for hook in hooks_on(module).values():
        if not is_harmless(hook):
            yield f"{where} has the hook {name_of(hook)!r}", hook
    for hook in accelerate_hooks(module):
        if not is_of_library(hook):
            yield f"{where} has the accelerate hook {name_of(hook)!r}", hook
    for name, function in vars(module).copy().items():
        if name in NOT_IN_STEPS or not callable(function) or not hasattr(type(module), name):
            continue
        if name != "forward" and not is_of_library(function):
            yield f"{where} has the method {name!r}, {name_of(function)!r}", function
        elif name == "forward" and not _is_usual(module, function):
            yield f"{where} has the forward {name_of(function)!r}", function


def _is_usual(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Is a replaced forward ours, that of the class, or what accelerate or torch makes of it?"""
    if isinstance(forward, MethodType) and forward.__func__ is type(module).forward:
        return True
    wraps = is_compiled(module) or accelerate_hooks(module) or is_harmless(forward)
    return bool(wraps) and is_of_library(forward)

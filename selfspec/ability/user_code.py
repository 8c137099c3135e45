"""Where other people's code runs in a model's forward, and what a verdict on it depends on.

The layers of libraries, and the code of a model's own class, are parts of the model. A user's
hooks, wrapper modules and replaced forwards may do anything: act by a switch or a counter, or on
long forwards alone. So no trial shows what they will do, and a trial is one more forward that they
see. Knows modules; runs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from selfspec.compat.modules import (
    accelerate_hooks,
    hooked_modules,
    hooks_of_all,
    hooks_on,
    is_compiled,
)
from selfspec.compat.origins import (
    OF_MODELS,
    functions_of,
    is_harmless,
    is_of_library,
    name_of,
    written_by_models,
)

_MARK = "selfspec_per_token"
_OF_MODELS = frozenset((OF_MODELS,))
_PLAIN = (bool, int, float, str)
_MOST = 64  # Switches are no longer than this: strings, containers, tensors.
_DEEPEST = 3  # An object of the model's that holds switches may hold others.

Marked = TypeVar("Marked")


class UserCode(NamedTuple):
    """A place where code runs that is no part of the model.

    It `is_trusted` if a library has put it there, or its author has marked it. `code` is the same
    for another closure of the same function in the same place.
    """

    what: str
    is_trusted: bool
    code: Hashable


def per_token(code: Marked) -> Marked:
    """Marks a hook, or a module's class: it treats each token by itself. Also a decorator.

    This is the word of its author. What becomes of a token must not depend on the other tokens of
    the forward, on their number, or on earlier forwards.

    >>> @per_token
    ... def steer(module, args, output):
    ...     return output + 1
    """
    setattr(code, _MARK, True)
    return code


def foreign_code(model: nn.Module) -> list[UserCode]:
    """All code in a model's forward that is no part of the model. Costs about 2 µs per module.

    Leaves out what is known to change no token: hooks of accelerate, `torch.compile`, and hooks
    that gradient checkpointing needs.
    """
    own = written_by_models(model)
    found = [_hook("all modules have", hook) for hook in hooks_of_all().values()]
    hooked, kinds = hooked_modules(model)
    put_in = {kind: code for kind in kinds if (code := _put_in(kind, own)) is not None}
    if hooked or put_in:
        wanted = set(map(id, hooked))
        for name, module in model.named_modules():
            if id(module) in wanted or type(module) in put_in:
                where = f"its module {name!r}" if name else "it"
                found += _in_module(module, put_in.get(type(module)), where)
    return [each for each in found if each is not None]


def distrusted(model: nn.Module) -> str | None:
    """Why a model is not even tried: whose code runs in it, and the way out. None if it may be."""
    for each in foreign_code(model):
        if not each.is_trusted:
            return (
                f"{each.what}, which is not tried, since it may treat drafts otherwise than plain "
                "steps; if it treats each token by itself, use SelfSpec(trust_hooks=True)"
            )
    return None


def own_values(model: nn.Module) -> tuple[Hashable, ...]:
    """The switches of modules whose classes are the model's own: numbers, texts, small tensors.

    Empty for a model of a library. Reads the values of the tensors from their device.
    """
    own = written_by_models(model)
    _, kinds = hooked_modules(model)
    read = {kind for kind in kinds if is_of_library(kind, own) and not is_of_library(kind)}
    seen = set[int]()
    modules = [module for module in model.modules() if type(module) in read] if read else []
    return tuple(tuple(_values(vars(module), own, seen, 0)) for module in modules)


def _in_module(module: nn.Module, put_in: Any, where: str) -> Iterator[UserCode | None]:
    if isinstance(put_in, type):
        yield _foreign(f"{where} is a {put_in.__module__}.{put_in.__qualname__}", put_in)
    elif put_in is not None:
        yield _foreign(f"{where} has the forward {name_of(put_in)!r}", put_in)
    for hook in hooks_on(module).values():
        yield _hook(f"{where} has", hook)
    for hook in accelerate_hooks(module):
        if not is_of_library(hook):
            yield _foreign(f"{where} has the accelerate hook {name_of(hook)!r}", hook)
    forward = vars(module).get("forward")
    if forward is not None and not _is_usual(module, forward):
        yield _foreign(f"{where} has the forward {name_of(forward)!r}", forward)


def _hook(where: str, hook: Any) -> UserCode | None:
    return None if is_harmless(hook) else _foreign(f"{where} the hook {name_of(hook)!r}", hook)


def _foreign(what: str, code: Any) -> UserCode:
    # A script may define a model and hook it, so that its package is no proof.
    is_trusted = getattr(code, _MARK, False) or is_of_library(code, _OF_MODELS)
    return UserCode(what, bool(is_trusted), (what, functions_of(code)))


def _put_in(kind: type[nn.Module], own: frozenset[str]) -> Any:
    """The class, its forward or its call, if that is no library's and not the model's own."""
    codes = (kind, kind.forward, kind.__call__)
    return next((code for code in codes if not is_of_library(code, own)), None)


def _is_usual(module: nn.Module, forward: Any) -> bool:
    """Is a replaced forward ours, that of the class, or what accelerate or torch makes of it?"""
    if isinstance(forward, MethodType) and forward.__func__ is type(module).forward:
        return True
    wraps = is_compiled(module) or accelerate_hooks(module) or is_harmless(forward)
    return bool(wraps) and is_of_library(forward, written_by_models(module))


def _values(
    parts: dict[Any, Any], own: frozenset[str], seen: set[int], depth: int
) -> Iterator[Hashable]:
    for name, value in parts.items():
        if (held := _value(value, own, seen, depth)) is not None:
            yield name, held


def _value(value: Any, own: frozenset[str], seen: set[int], depth: int) -> Hashable:
    """What a switch is set to; None for what is no switch, is empty, or was read before."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in seen or isinstance(value, nn.Module):
        return None
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        is_switch = value.numel() <= _MOST and not value.requires_grad and not value.is_meta
        return repr(value.tolist()) if is_switch else None
    parts: Any = {}
    if isinstance(value, dict):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    elif is_of_library(type(value), own) and not is_of_library(type(value)):
        parts = getattr(value, "__dict__", {})
    if depth == _DEEPEST or len(parts) > _MOST:
        return None
    return tuple(_values(parts, own, seen, depth + 1)) or None

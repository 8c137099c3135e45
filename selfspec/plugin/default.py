"""The default assistant of a model: which of its calls it drafts for, and which are left to stock.

Code that knows nothing of selfspec calls a model with a default assistant. So what can't be served
is no error here: it goes to transformers as it came.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin

from selfspec.plugin.arguments import setting, unpassable
from selfspec.plugin.rules import unservable
from selfspec.plugin.spec import SelfSpec


class DefaultAssistant:
    """Holds the `SelfSpec` of a model. Copies of the model share it; pickled ones have none."""

    def __init__(self, spec: SelfSpec | None = None) -> None:
        self.spec = spec

    def __deepcopy__(self, _memo: Any) -> DefaultAssistant:
        return self

    def __reduce__(self) -> tuple[type[DefaultAssistant], tuple[()]]:
        return DefaultAssistant, ()


def has_own_generate(model: Any) -> bool:
    """Does the class bring a `generate()` that may do with our loop what it likes?

    That of a PEFT wrapper is known: it passes everything on to the model inside.
    """
    is_wrapper = hasattr(model, "get_base_model")
    return not is_wrapper and type(model).generate is not GenerationMixin.generate


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a `generate()` call by their names."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(GenerationMixin.generate)
    bound = signature.bind(None, *args, **kwargs).arguments
    del bound["self"]
    others = bound.pop("kwargs", {})
    return {**bound, **others}


def reason_to_step_aside(model: Any, spec: SelfSpec, arguments: Mapping[str, Any]) -> str | None:
    """Why a call can't be given to the loop of drafts; None where it can.

    What the loop itself decodes plainly, such as a static KV cache, is no such reason. A strict
    assistant never steps aside.
    """
    if spec.config.strict:
        return None
    if has_own_generate(model):
        return f"{type(model).__name__} has a generate() of its own"
    if rule := unservable(model, partial(setting, model, arguments)) or unpassable(
        model, arguments
    ):
        return rule.partition(";")[0]
    if arguments.get("assistant_model") is not None:
        return "assistant_model= names another assistant"
    if arguments.get("synced_gpus") or _num_processes() > 1:
        return "several processes may have to run their forwards in step"
    if spec.draft_model is not None and not _has_ids(arguments):
        return "a draft model must be given the prompt as token ids"
    return None


def _num_processes() -> int:
    distributed = torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if there else 1


def _has_ids(arguments: Mapping[str, Any]) -> bool:
    """Is there a prompt in ids? Without any prompt, stock makes one of the first token."""
    given = (arguments.get(name) for name in ("inputs", "input_ids"))
    return arguments.get("inputs_embeds") is None or any(ids is not None for ids in given)

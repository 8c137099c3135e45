"""`attach`: lets one model's `generate()` take `assistant=`, and `detach` undoes it."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any, TypeVar

from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerationMixin

from selfspec.errors import AttachError, UnsupportedError
from selfspec.plugin.spec import SelfSpec

__all__ = ["attach", "detach", "hub_folder", "take_stop_strings"]

M = TypeVar("M")
_BEFORE = "_generate_before_attach"  # where an instance keeps a generate() of its own


def attach(model: M) -> M:
    """Makes `model.generate(..., assistant=spec)` work on this instance; returns the model.

    Without `assistant=` the call goes to the model's own `generate()` untouched. Works on a PEFT
    wrapper or on the model inside it. Attaching twice changes nothing.
    """
    if isinstance(model, type) or not callable(getattr(model, "generate", None)):
        raise AttachError(f"attach needs a model instance with generate() (got {model!r:.80})")
    if not _is_attached(model):
        vars(model)[_BEFORE] = vars(model).get("generate")
        # a bound method and no closure, so that a deep copy of the model is attached to itself
        vars(model)["generate"] = types.MethodType(_generate, model)
    return model


def detach(model: M) -> M:
    """Takes `assistant=` off again; a model that is not attached is left alone."""
    if _is_attached(model):
        del vars(model)["generate"]
        before = vars(model).pop(_BEFORE)
        if before is not None:
            vars(model)["generate"] = before
    return model


def hub_folder() -> Path:
    """The folder to pass as `custom_generate=`, or to copy into a Hub repository."""
    return Path(__file__).parent.parent / "hub"


def _is_attached(model: Any) -> bool:
    return _BEFORE in getattr(model, "__dict__", {})


@functools.wraps(GenerationMixin.generate)
def _generate(model: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
    own_generate = vars(model)[_BEFORE] or functools.partial(type(model).generate, model)
    if assistant is None:
        return own_generate(*args, **kwargs)
    _check(assistant, kwargs)
    take_stop_strings(model, kwargs)
    return own_generate(*args, custom_generate=assistant, **kwargs)


def take_stop_strings(model: Any, kwargs: dict[str, Any]) -> None:
    """Makes of `stop_strings` the criterion that stock makes of them.

    transformers drops the tokenizer on the way to a custom decoding loop, and then can't. Without
    a tokenizer nothing is changed, so that stock's own error comes.
    """
    tokenizer = kwargs.pop("tokenizer", None)
    configs = (kwargs.get("generation_config"), model.generation_config)
    set_ones = (getattr(config, "stop_strings", None) for config in configs)
    strings = kwargs.get("stop_strings", next(filter(None, set_ones), None))
    if tokenizer is None or not strings:
        return
    kwargs["stop_strings"] = None  # a keyword goes before what any config says
    given = kwargs.get("stopping_criteria") or ()
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*given, criterion])


def _check(assistant: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(assistant, SelfSpec):
        raise AttachError(f"assistant must be a SelfSpec (got {assistant!r:.80})")
    for name in ("assistant_model", "custom_generate"):
        if kwargs.pop(name, None) is not None:
            raise UnsupportedError(f"assistant= and {name}= exclude each other; pass one of them")
    if kwargs.get("token_healing"):
        raise UnsupportedError(
            "token_healing=True needs the tokenizer, which a custom decoding loop is not given; "
            "pass input_ids=model.heal_tokens(input_ids, tokenizer) instead"
        )

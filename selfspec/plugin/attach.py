"""`attach`: lets one model's `generate()` draft, and `detach` undoes it."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any, TypeVar

from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerationMixin

from selfspec.errors import AttachError, UnsupportedError
from selfspec.plugin.default import (
    DefaultAssistant,
    has_own_generate,
    named,
    reason_to_step_aside,
)
from selfspec.plugin.prediction import encode_prediction
from selfspec.plugin.spec import SelfSpec

__all__ = [
    "attach",
    "detach",
    "hub_folder",
    "refuse_paged",
    "take_assistant_model",
    "take_stop_strings",
]

M = TypeVar("M")
# Where an instance keeps the methods of its own that `attach` stands in for; None if it had none.
_BEFORE = "_methods_before_attach"
# Where it keeps the `DefaultAssistant`.
_DEFAULT = "_default_assistant"


def attach(model: M, assistant: SelfSpec | None = None) -> M:
    """Makes `model.generate(..., assistant=spec)` work on this instance; returns the model.

    Beside it, `prediction=` takes what the answer will probably look like: token ids, or text with
    `tokenizer=`. Without `assistant=` the call goes to the model's own `generate()` untouched.

    An `assistant` that is given here is the default one: it drafts in each call that names none, so
    that pipelines, servers and other people's code gain as they are. What it can't draft for, such
    as beam search, goes on as without it, with one warning of the logger ``selfspec``; it refuses
    that under `strict`. ``generate(..., assistant=None)`` switches it off for a call.

    Works on a PEFT wrapper or on the model inside it, and on what `torch.compile(model)` gives,
    whose `generate()` is that of the model inside. Attaching twice changes nothing, or only the
    default assistant.
    """
    target = _inside(model)
    if isinstance(target, type) or not callable(getattr(target, "generate", None)):
        raise AttachError(f"attach needs a model instance with generate() (got {model!r:.80})")
    if assistant is not None:
        _check_kind(assistant)
    own = vars(target)
    if not _is_attached(target):
        own[_BEFORE] = {name: own.get(name) for name in _STAND_INS}
        # Bound methods and no closures, so that a deep copy of the model is attached to itself.
        own.update({name: types.MethodType(ours, target) for name, ours in _STAND_INS.items()})
        own[_DEFAULT] = DefaultAssistant()
    if assistant is not None:
        own[_DEFAULT] = DefaultAssistant(assistant)
    return model


def detach(model: M) -> M:
    """Takes `assistant=` and the default off again; leaves alone a model that is not attached."""
    target = _inside(model)
    if _is_attached(target):
        del vars(target)[_DEFAULT]
        for name, before in vars(target).pop(_BEFORE).items():
            del vars(target)[name]
            if before is not None:
                vars(target)[name] = before
    return model


def hub_folder() -> Path:
    """The folder to pass as `custom_generate=`, or to copy into a Hub repository."""
    return Path(__file__).parent.parent / "hub"


def _inside(model: Any) -> Any:
    """The model inside of what `torch.compile` gives, or the model itself."""
    return getattr(model, "_orig_mod", model)


def _is_attached(model: Any) -> bool:
    return _BEFORE in getattr(model, "__dict__", {})


def _before(model: Any, name: str) -> Any:
    return vars(model)[_BEFORE][name] or functools.partial(getattr(type(model), name), model)


@functools.wraps(GenerationMixin.generate)
def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    default = vars(model)[_DEFAULT].spec
    if "assistant" not in kwargs and default is not None:
        return _generate_by_default(model, default, args, kwargs)
    assistant = kwargs.pop("assistant", None)
    if assistant is None:
        _refuse_lonely_prediction(kwargs)
        return _leave_to_stock(model, *args, **kwargs)
    return _draft(model, assistant, args, kwargs)


def _refuse_lonely_prediction(kwargs: dict[str, Any]) -> None:
    """A prediction is for drafts. Stock would say that the model does not know the argument."""
    if kwargs.get("prediction") is not None and kwargs.get("custom_generate") is None:
        raise UnsupportedError(
            "prediction= needs assistant= beside it, since it is what drafts are made from (got "
            "none); pass assistant=SelfSpec(), or leave prediction= out"
        )


def _leave_to_stock(model: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(kwargs.get("custom_generate"), SelfSpec):
        refuse_paged(kwargs)
    return _before(model, "generate")(*args, **kwargs)


def _generate_by_default(
    model: Any, spec: SelfSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if kwargs.get("custom_generate") is not None:  # Another loop is asked for by name.
        return _leave_to_stock(model, *args, **kwargs)
    if spec.config.strict:
        return _draft(model, spec, args, kwargs)
    if has_own_generate(model):
        spec.step_aside(model, f"{type(model).__name__} has a generate() of its own")
        return _leave_to_stock(model, *args, **kwargs)
    arguments = named(args, kwargs)
    if reason := reason_to_step_aside(model, spec, arguments):
        spec.step_aside(model, reason)
        arguments.pop("prediction", None)  # It decides nothing, and stock doesn't know it.
        return _leave_to_stock(model, **arguments)
    return _draft(model, spec, (), arguments)


def _draft(model: Any, assistant: SelfSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check(assistant, kwargs)
    encode_prediction(kwargs)
    take_stop_strings(model, kwargs)
    return _before(model, "generate")(*args, custom_generate=assistant, **kwargs)


@functools.wraps(GenerationMixin.generate_batch)
def _generate_batch(model: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
    if assistant is not None:
        raise UnsupportedError(
            "generate_batch() can't draft: its paged KV cache takes no draft back (got "
            "assistant=); call generate() with a padded batch, or leave assistant= out"
        )
    return _before(model, "generate_batch")(*args, **kwargs)


_STAND_INS = {"generate": _generate, "generate_batch": _generate_batch}


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


def take_assistant_model(kwargs: dict[str, Any]) -> None:
    """Makes `assistant_model` the draft model of this call, which stock would use by itself."""
    tokenizer = kwargs.get("assistant_tokenizer")
    if tokenizer is not None:
        raise UnsupportedError(
            "assistant_tokenizer= must be left out, since a draft model has the tokenizer of the "
            f"model (got a {type(tokenizer).__name__}); or call generate() without assistant="
        )
    model = kwargs.pop("assistant_model", None)
    if model is not None:
        kwargs["draft_model"] = model


def refuse_paged(kwargs: dict[str, Any]) -> None:
    """Raises for a paged KV cache, with which transformers would go on without any drafts."""
    if kwargs.get("cache_implementation") == "paged":
        raise UnsupportedError(
            "cache_implementation='paged' can't be drafted for: a paged KV cache takes no draft "
            "back; leave it out, or call generate() without selfspec"
        )


def _check_kind(assistant: Any) -> None:
    if not isinstance(assistant, SelfSpec):
        raise AttachError(f"assistant must be a SelfSpec (got {assistant!r:.80})")


def _check(assistant: Any, kwargs: dict[str, Any]) -> None:
    _check_kind(assistant)
    if kwargs.pop("custom_generate", None) is not None:
        raise UnsupportedError(
            "assistant= and custom_generate= exclude each other; pass one of them"
        )
    take_assistant_model(kwargs)
    refuse_paged(kwargs)
    if kwargs.get("token_healing"):
        raise UnsupportedError(
            "token_healing=True needs the tokenizer, which a custom decoding loop is not given; "
            "pass input_ids=model.heal_tokens(input_ids, tokenizer) instead"
        )

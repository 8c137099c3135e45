"""`attach`: lets one model's `generate()` draft, and `detach` undoes it.

Code that knows nothing of selfspec calls a model that has a default assistant. So what that can't
serve is no error: it goes to transformers as it came.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from selfspec.compat.modules import inside_compiled, inside_wrappers
from selfspec.errors import AttachError, SelfSpecError, UnsupportedError, shown
from selfspec.plugin.arguments import for_drafts
from selfspec.plugin.draft_pair import new_draft_model
from selfspec.plugin.loop import Loop
from selfspec.plugin.refusals import Arguments, Outcome, has_own_generate, reason_for
from selfspec.plugin.spec import SelfSpec
from selfspec.stats import GenerationStats

M = TypeVar("M")
# Where an instance keeps the methods of its own that `attach` replaces; None if it had none.
_BEFORE = "_methods_before_attach"
# Where it keeps the `DefaultAssistant`.
_DEFAULT = "_default_assistant"


class DefaultAssistant:
    """Holds the `SelfSpec` of a model. Copies of the model share it; pickled ones have none.

    Pickle looks methods up by name, before the model that it reads has any attributes. So such a
    model has those of its class, until it is attached again.
    """

    def __init__(self, spec: SelfSpec | None = None) -> None:
        self.spec = spec

    def __deepcopy__(self, _memo: Any) -> DefaultAssistant:
        return self

    def __reduce__(self) -> tuple[type[DefaultAssistant], tuple[()]]:
        return DefaultAssistant, ()


def attach(model: M, assistant: SelfSpec | None = None) -> M:
    """Makes `model.generate(..., assistant=spec)` work on this instance; returns the model.

    With it, `prediction=` takes what the answer will probably look like: token ids, or text with
    `tokenizer=`. Without `assistant=` the call goes to the model's own `generate()`.

    An `assistant` that is given here is the default one, which drafts in each call that names none.
    What it can't draft for, such as beam search, goes on as without it, with one warning of the
    logger ``selfspec``; under `strict` that is refused. ``generate(..., assistant=None)`` switches
    it off for a call.

    Works on a PEFT wrapper or on the model inside it, and on what `torch.compile(model)` gives,
    whose `generate()` is that of the model inside. Attaching twice changes nothing, or only the
    default assistant.
    """
    target = inside_compiled(model)
    if isinstance(target, type) or not callable(getattr(target, "generate", None)):
        raise AttachError(
            f"attach needs a model instance with generate() (got {shown(model)}); load a model "
            "and call selfspec.attach(model), or for a pipeline selfspec.attach(pipe.model)"
        )
    attributes = vars(target)
    if assistant is not None:
        check_assistant(assistant)
    function = getattr(attributes.get("generate"), "__func__", None)
    if function is not None and function is getattr(type(target), "generate", None):
        detach(target)  # It was attached when it was pickled.
    if _BEFORE not in attributes:
        names = [name for name in _STAND_INS if hasattr(target, name)]
        attributes[_BEFORE] = {name: attributes.get(name) for name in names}
        # Bound methods and no closures, so that a deep copy of the model is attached to itself.
        attributes.update({name: types.MethodType(_STAND_INS[name], target) for name in names})
        attributes[_DEFAULT] = DefaultAssistant()
    if assistant is not None:
        attributes[_DEFAULT] = DefaultAssistant(assistant)
    return model


def detach(model: M) -> M:
    """Takes `assistant=` and the default off again; leaves alone a model that is not attached."""
    target = inside_compiled(model)
    if _BEFORE in getattr(target, "__dict__", {}):
        del vars(target)[_DEFAULT]
        for name, before in vars(target).pop(_BEFORE).items():
            del vars(target)[name]
            if before is not None:
                vars(target)[name] = before
    return model


def hub_folder() -> Path:
    """The folder to pass as `custom_generate=`, or to copy into a Hub repository."""
    return Path(__file__).parent.parent / "hub"


def _before(model: PreTrainedModel, name: str) -> Any:
    if (method := vars(model)[_BEFORE][name]) is not None:
        return method
    if hasattr(type(model), name):
        return functools.partial(getattr(type(model), name), model)
    return model.__getattr__(name)  # A wrapper of PEFT has it from the model inside.


@functools.wraps(GenerationMixin.generate)
def _generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    stock = _before(model, "generate")
    assistant, is_named = _chosen(model, kwargs)
    if assistant is None:
        return stock(*args, **kwargs)
    if args and not has_own_generate(model):
        args, kwargs = (), _named(args, kwargs)
    is_lenient = not (is_named or assistant.config.strict)
    try:
        if is_lenient:
            _check_for_default(model, assistant, kwargs)
        for_loop, ready = for_drafts(model, kwargs)
    except SelfSpecError as refused:
        if not is_lenient:
            raise
        reason = str(refused).partition(";")[0]
        assistant.warn(model, GenerationStats(disabled_reason=reason))
        for name in ("prediction", "max_nodes"):  # They decide nothing, and stock knows neither.
            kwargs.pop(name, None)
        return stock(*args, **kwargs)
    return stock(*args, custom_generate=Loop(assistant, for_loop, is_lenient), **ready)


def _chosen(model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[SelfSpec | None, bool]:
    """The assistant of a call, taken out of its arguments, and whether the call names it.

    A call names one as `assistant=` or as `custom_generate=`. If it names neither one nor another
    loop, it gets the default.
    """
    if isinstance(kwargs.get("assistant_model"), SelfSpec):
        raise AttachError("assistant_model must be a model (got a SelfSpec); pass it as assistant=")
    is_named, assistant = "assistant" in kwargs, kwargs.pop("assistant", None)
    loop = kwargs.pop("custom_generate", None)
    if assistant is None and isinstance(loop, SelfSpec):
        return loop, True
    if assistant is not None:
        check_assistant(assistant)
        if loop is not None:
            raise UnsupportedError(
                "assistant= and custom_generate= exclude each other; pass one of them"
            )
        return assistant, True
    if loop is not None:
        kwargs["custom_generate"] = loop
    return (None if is_named or loop is not None else vars(model)[_DEFAULT].spec), is_named


def _check_for_default(
    model: PreTrainedModel, assistant: SelfSpec, kwargs: Mapping[str, Any]
) -> None:
    """Refuses what a default assistant leaves to transformers."""
    draft_model = assistant.draft_model
    if reason := reason_for(Outcome.ASIDE, Arguments(model, kwargs, draft_model)):
        raise UnsupportedError(reason)
    if draft_model is not None:
        new_draft_model(draft_model, inside_wrappers(model), 1, assistant.models)


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(GenerationMixin.generate).bind(None, *args, **kwargs).arguments
    del bound["self"]
    others = bound.pop("kwargs", {})
    return {**bound, **others}


@functools.wraps(GenerationMixin.generate_batch)
def _generate_batch(
    model: PreTrainedModel, *args: Any, assistant: Any = None, **kwargs: Any
) -> Any:
    if assistant is not None:
        raise UnsupportedError(
            "generate_batch() can't draft: its paged KV cache takes no draft back (got "
            "assistant=); call generate() with a padded batch, or leave assistant= out"
        )
    return _before(model, "generate_batch")(*args, **kwargs)


_STAND_INS = {"generate": _generate, "generate_batch": _generate_batch}


def check_assistant(assistant: Any) -> None:
    if not isinstance(assistant, SelfSpec):
        raise AttachError(f"assistant must be a SelfSpec (got {shown(assistant)})")

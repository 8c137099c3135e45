"""`attach`: lets one model's `generate()` draft, and `detach` undoes it.

Code that knows nothing of selfspec calls a model that has a default assistant. So what that can't
serve is no error: it goes to transformers as it came.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from selfspec.compat.generation import generate_batch_of_class
from selfspec.compat.modules import inside_compiled, inside_wrappers
from selfspec.errors import AttachError, SelfSpecError, UnsupportedError, shown
from selfspec.plugin.loop import loop_for
from selfspec.plugin.parts import new_draft_model
from selfspec.plugin.refusals import CallArguments, Consequence, overrides_generate, reason_for
from selfspec.plugin.spec import SelfSpec
from selfspec.stats import GenerationStats
from selfspec.weights.packing import pack as pack_weights
from selfspec.weights.packing import unpack

_log = logging.getLogger("selfspec")

M = TypeVar("M")
_LOCK = threading.Lock()
_ATTACHMENT = "_selfspec_attachment"  # Where an instance keeps its `Attachment`.


class Attachment:
    """The default `SelfSpec` of a model, and the `generate()` that the instance had of its own.

    Copies of a model share the `SelfSpec`; pickled ones have none. Pickle looks methods up by name,
    before the model that it reads has any attributes. So such a model has the `generate()` of its
    class, until it is attached again.
    """

    def __init__(self, spec: SelfSpec | None = None, method: Any = None) -> None:
        self.spec = spec
        self.method = method

    def __deepcopy__(self, memo: Any) -> Attachment:
        return Attachment(self.spec, copy.deepcopy(self.method, memo))

    def __reduce__(self) -> tuple[type[Attachment], tuple[()]]:
        return Attachment, ()


def attach(model: M, assistant: SelfSpec | None = None, *, pack: bool = False) -> M:
    """Makes `model.generate(..., assistant=spec)` work on this instance; returns the model.

    With it, `prediction=` takes what the answer will probably look like: token ids, or text with
    `tokenizer=`. Without `assistant=` the call goes to the model's own `generate()`.

    An `assistant` that is given here is the default one, which drafts in each call that names none.
    What it can't draft for, such as beam search, goes on as without it, with one warning of the
    logger ``selfspec``. ``generate(..., assistant=None)`` switches it off for a call.

    With `pack`, the model's linear layers hold their weights in another order from now on, in which
    a CPU reads them faster: steps of several tokens gain most. All calls compute from them, those
    without `assistant=` too, so in half precision their texts may be others than before. It takes
    seconds, and no more memory but for a head that shares its weight with the embedding. Where it
    can't be done or does not pay, as on a GPU or on ARM, the logger ``selfspec`` says why, and all
    goes on as it was. A weight becomes an ordinary parameter again once other code reads, trains,
    moves, saves or merges it; attaching with `pack` again packs it again. A forward with gradients
    does so too: call ``model.requires_grad_(False)`` or use ``torch.no_grad()`` to avoid that.

    Pack once the model is complete, on its device and in its dtype, with its adapters, and before
    another thread runs it. Optimizers may have its parameters already, which stay the same objects.
    But a tensor that was taken from a parameter before, such as ``weight.data`` or a view, is no
    longer its memory: what is written to it is lost. So wrap the model in FSDP or the like before;
    weights that share memory with each other are left as they are.

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
    if assistant is not None:
        check_assistant(assistant)
    attributes = vars(target)
    # Another thread that attaches the model must not take our method for the instance's own.
    with _LOCK:
        method, attachment = attributes.get("generate"), attributes.get(_ATTACHMENT)
        is_of_class = _is_of_class(target, method)
        if attachment is None or method is None or is_of_class:
            attachment = Attachment(method=None if is_of_class else method)
            # A bound method and no closure, so that a deep copy of the model is attached to itself.
            attributes["generate"] = types.MethodType(_generate, target)
            if hasattr(target, "generate_batch"):
                attributes["generate_batch"] = types.MethodType(_generate_batch, target)
        if assistant is not None:
            attachment = Attachment(assistant, attachment.method)
        attributes[_ATTACHMENT] = attachment
    if pack and (reason := pack_weights(inside_wrappers(target))) is not None:
        _log.warning("weights of %s are not packed: %s", type(target).__name__, reason)
    return model


def _is_of_class(model: Any, method: Any) -> bool:
    # One that was attached when it was pickled has the method of its class.
    of_class = getattr(type(model), "generate", None)
    is_of_class = isinstance(method, types.MethodType) and method.__func__ is of_class
    # In a prepared folder, transformers has put our own file in the place of the class's method.
    return is_of_class or hasattr(getattr(method, "func", None), "belongs_to_selfspec")


def detach(model: M) -> M:
    """Takes `assistant=` and the default off again, and gives packed weights back.

    Leaves alone a model that is not attached. A function that somebody has put around `generate`
    stays, and goes on to take `assistant=`.
    """
    target = inside_compiled(model)
    attributes = getattr(target, "__dict__", {})
    attachment, method = attributes.get(_ATTACHMENT), attributes.get("generate")
    if attachment is None:
        return model
    is_ours = getattr(method, "__func__", None) is _generate
    if is_ours or method is None or _is_of_class(target, method):
        for name in (_ATTACHMENT, "generate", "generate_batch"):
            attributes.pop(name, None)
        if attachment.method is not None:
            attributes["generate"] = attachment.method
    else:
        attributes[_ATTACHMENT] = Attachment(method=attachment.method)
    unpack(inside_wrappers(target))
    return model


def hub_folder() -> Path:
    """The folder to pass as `custom_generate=`, or to copy into a Hub repository."""
    return Path(__file__).parent.parent / "hub"


@functools.wraps(GenerationMixin.generate)
def _generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    # Read once, since another thread may detach the model meanwhile.
    attachment = vars(model).get(_ATTACHMENT) or Attachment()
    plain_generate = attachment.method or _of_class(model, "generate")
    assistant, is_named = _chosen(attachment, kwargs)
    if assistant is None:
        return plain_generate(*args, **kwargs)
    if args and not overrides_generate(model):
        args, kwargs = (), _named(args, kwargs)
    try:
        if not is_named:
            _check_for_default(model, assistant, kwargs)
        loop, ready = loop_for(assistant, model, kwargs)
    except SelfSpecError as refused:
        if is_named:
            raise
        _warn(assistant, model, refused)
        for name in ("prediction", "max_nodes"):  # transformers knows neither.
            kwargs.pop(name, None)
        return plain_generate(*args, **kwargs)
    return plain_generate(*args, custom_generate=replace(loop, is_default=not is_named), **ready)


@functools.wraps(generate_batch_of_class)
def _generate_batch(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    from selfspec.batch.continuous import generate_batch

    assistant, is_named = _chosen(vars(model).get(_ATTACHMENT) or Attachment(), kwargs)
    if assistant is not None:
        try:
            return generate_batch(model, assistant, *args, **kwargs)
        except SelfSpecError as refused:
            if is_named:
                raise
            _warn(assistant, model, refused)
    return _of_class(model, "generate_batch")(*args, **kwargs)


def _warn(assistant: SelfSpec, model: PreTrainedModel, refused: SelfSpecError) -> None:
    """Says why a call with a default assistant is transformers' own."""
    reason = str(refused).partition(";")[0]
    assistant.warn(model, GenerationStats(disabled_reason=reason))


def _of_class(model: PreTrainedModel, name: str) -> Any:
    if hasattr(type(model), name):
        return types.MethodType(getattr(type(model), name), model)
    return model.__getattr__(name)  # A wrapper of PEFT has it from the model inside.


def _chosen(attachment: Attachment, kwargs: dict[str, Any]) -> tuple[SelfSpec | None, bool]:
    """The assistant of a call, taken out of its arguments, and whether the call names it.

    A call names one as `assistant=` or as `custom_generate=`. If it names neither one nor another
    loop, it gets the default.
    """
    if "assistant" not in kwargs and kwargs.get("custom_generate") is None:
        kwargs.pop("custom_generate", None)
        return attachment.spec, False
    assistant = kwargs.pop("assistant", None)
    if isinstance(kwargs.get("custom_generate"), SelfSpec) and assistant is None:
        assistant = kwargs.pop("custom_generate")
    if assistant is not None:
        check_assistant(assistant)
        if kwargs.pop("custom_generate", None) is not None:
            raise UnsupportedError(
                "assistant= and custom_generate= exclude each other; pass one of them"
            )
    return assistant, True


def _check_for_default(
    model: PreTrainedModel, assistant: SelfSpec, kwargs: Mapping[str, Any]
) -> None:
    """Refuses what a default assistant leaves to transformers."""
    draft_model = assistant.draft_model
    if reason := reason_for(Consequence.ASIDE, CallArguments(model, kwargs, draft_model)):
        raise UnsupportedError(reason)
    if draft_model is not None and not isinstance(draft_model, str):
        new_draft_model(draft_model, inside_wrappers(model), 1, 1, assistant.runner)


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(GenerationMixin.generate).bind(None, *args, **kwargs).arguments
    del bound["self"]
    others = bound.pop("kwargs", {})
    return {**bound, **others}


def check_assistant(assistant: Any) -> None:
    if not isinstance(assistant, SelfSpec):
        raise AttachError(
            f"assistant must be a SelfSpec (got {shown(assistant)}); make one with SelfSpec()"
        )

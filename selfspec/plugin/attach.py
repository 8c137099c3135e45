"""`attach`: lets one model's `generate()` take `assistant=`, and `detach` undoes it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeVar

from selfspec.errors import AttachError, UnsupportedError
from selfspec.plugin.spec import SelfSpec

__all__ = ["attach", "detach", "hub_folder"]

M = TypeVar("M")


def attach(model: M) -> M:
    """Makes `model.generate(..., assistant=spec)` work on this instance; returns the model.

    Without `assistant=` the call goes to the model's own `generate()` untouched. Works on a PEFT
    wrapper or on the model inside it. Attaching twice changes nothing.
    """
    own_generate = getattr(model, "generate", None)
    if own_generate is None or isinstance(model, type):
        raise AttachError(f"attach needs a model instance with generate() (got {model!r:.80})")
    if not _is_attached(model):
        model.generate = _wrapped(own_generate)  # type: ignore[attr-defined]
    return model


def detach(model: M) -> M:
    """Takes `assistant=` off again; a model that is not attached is left alone."""
    if _is_attached(model):
        del model.generate  # type: ignore[attr-defined]
    return model


def hub_folder() -> Path:
    """The folder to pass as `custom_generate=`, or to copy into a Hub repository."""
    return Path(__file__).parent.parent / "hub"


def _is_attached(model: Any) -> bool:
    return getattr(vars(model).get("generate"), "_selfspec", False)


def _wrapped(own_generate: Any) -> Any:
    @functools.wraps(own_generate)
    def generate(*args: Any, assistant: SelfSpec | None = None, **kwargs: Any) -> Any:
        if assistant is None:
            return own_generate(*args, **kwargs)
        _check(assistant, kwargs)
        return own_generate(*args, custom_generate=assistant, **kwargs)

    generate._selfspec = True  # type: ignore[attr-defined]
    return generate


def _check(assistant: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(assistant, SelfSpec):
        raise AttachError(f"assistant must be a SelfSpec (got {assistant!r:.80})")
    for name in ("assistant_model", "custom_generate"):
        if kwargs.pop(name, None) is not None:
            raise UnsupportedError(f"assistant= and {name}= exclude each other; pass one of them")

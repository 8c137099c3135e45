"""The switches that stock sets on a model while it decodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["decode_mode"]


def decode_mode(model: Any) -> AbstractContextManager[None]:
    """Inside, the model has stock's switches for decoding; older transformers have none."""
    enter: Callable[[], AbstractContextManager[None]]
    enter = getattr(model, "_optimize_model_for_decode", nullcontext)
    return enter()

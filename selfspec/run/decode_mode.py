"""Stock's own switches for the time of decoding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["decode_mode"]


def decode_mode(model: Any) -> AbstractContextManager[None]:
    """Inside, the model decodes with what stock switches on for it; nothing in older versions."""
    enter: Callable[[], AbstractContextManager[None]]
    enter = getattr(model, "_optimize_model_for_decode", nullcontext)
    return enter()

"""Rotary embeddings whose frequencies depend on how far a forward reaches.

"dynamic" and "longrope" look at the largest position of the whole forward. A tree that reaches
beyond the length where they change would turn all its tokens to the frequencies of a longer text,
where stock still has the short ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["changing_rope", "rope_reason", "stands_beyond"]


def changing_rope(config: Any) -> str | None:
    """The kind of a rotary embedding that changes with the length; None where there is none."""
    return next((kind for kind, _ in _limits(config)), None)


def stands_beyond(config: Any, model_kwargs: Mapping[str, Any]) -> bool:
    """Is the longest row so long that the others' frequencies hang on its being there?"""
    return any(_num_positions(model_kwargs) > limit for _, limit in _limits(config))


def rope_reason(config: Any, reach: int, model_kwargs: Mapping[str, Any]) -> str | None:
    """Why no draft can be made that reaches so far beyond the prompt; None where one can."""
    for kind, limit in _limits(config):
        first = _num_positions(model_kwargs)
        if first + reach < limit or (kind == "longrope" and first > limit):
            continue
        return f"its {kind} rotary embedding changes with the length of a forward beyond {limit}"
    return None


def _limits(config: Any) -> Iterator[tuple[str, int]]:
    """Each such embedding's kind, and the length from which on it changes."""
    config = config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = str(rope.get("rope_type", ""))
        if "dynamic" in kind:
            yield "dynamic", config.max_position_embeddings
        elif kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            yield "longrope", original or config.original_max_position_embeddings


def _num_positions(model_kwargs: Mapping[str, Any]) -> int:
    """Positions that the longest row has read when its prompt has been."""
    position_ids = model_kwargs.get("position_ids")
    return 0 if position_ids is None else int(position_ids.max()) + 1

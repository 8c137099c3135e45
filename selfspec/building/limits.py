"""The sizes of a model's inputs and outputs."""

from __future__ import annotations

from typing import Any


def max_positions(model: Any) -> int | None:
    """The number of positions that the model has; None if its config doesn't say."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def vocab_size(model: Any) -> int:
    """The width of its logits, which may be padded beyond the tokenizer's vocabulary."""
    return int(model.config.get_text_config(decoder=True).vocab_size)

"""The attention types of a model's layers, as its config names them."""

from __future__ import annotations

from typing import NamedTuple

from selfspec.run.layout import Window

__all__ = ["AttentionTypes"]


class AttentionTypes(NamedTuple):
    """The attention type of each layer, the window of each type, and where scales change.

    `scale_period`: Llama 4 scales its queries by the block of so many columns that they stand
    in, and reads the column off the KV; 0 for everybody else.
    """

    by_layer: tuple[str, ...]
    windows: dict[str, Window]
    scale_period: int

"""The attention types of a model's layers, as its config names them."""

from __future__ import annotations

from typing import NamedTuple

from selfspec.run.layout import Window

__all__ = ["AttentionTypes"]


class AttentionTypes(NamedTuple):
    """The attention type of each layer, the window of each type, and where scales change.

    `scale_period` is 0 for all models but Llama 4. That one scales a query by the block of
    `scale_period` columns that it is in, and takes its column from the length of the KV.
    """

    by_layer: tuple[str, ...]
    windows: dict[str, Window]
    scale_period: int

    @property
    def window_sizes(self) -> dict[str, int]:
        """How many columns back each type sees; 0 if it sees all."""
        return {name: window.size for name, window in self.windows.items()}

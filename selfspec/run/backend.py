"""The interface through which the engine runs the model over drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from selfspec.records import DraftTree

__all__ = ["Backend"]


class Backend(Protocol):
    """Runs the model over trees and keeps the KV of the accepted paths; serves one call."""

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        ...

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        ...

    @property
    def front(self) -> int:
        """How many columns of the KV are in front of the next tree."""
        ...

    @property
    def num_pending(self) -> int | None:
        """How many committed tokens the next forward reads again; None if none ever has to be."""
        ...

    def max_width(self, max_nodes: int) -> int:
        """How many of `max_nodes` nodes the next forward may have."""
        ...

    def lay_out(self, trees: Sequence[DraftTree]) -> Any:
        """The arguments of one forward."""
        ...

    def forward(self, layout: Any) -> torch.Tensor:
        """The logits (B, Q, V) of every node."""
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path, which starts at the root, and forgets the rest."""
        ...

    @property
    def setting_up(self) -> float:
        """Seconds of the last `lay_out` that went into what later forwards will use too."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops the rows that stopped; `rows` are the indices of the others."""
        ...

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back; what they hold is for those who get the cache."""
        ...

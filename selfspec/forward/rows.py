"""What the rows of a forward know of their keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.forward.sizes import ENDLESS

if TYPE_CHECKING:
    from selfspec.forward.layout import Layout


@dataclass(eq=False)
class KVRow:
    """What a row knows of its keys and values, and where its next token is. A `Row` is one."""

    num_columns: int = 0  # that are committed
    max_columns: int = ENDLESS  # How many it may come to need.
    start: int = 0  # Its first column that counts.
    position: NDArray[Any] = field(default_factory=lambda: np.zeros((), np.int64))  # (...,)
    place: int = 0  # The row of slots that belongs to it.
    # Of each attention type, the first column that the prompt has left in transformers' layers.
    first_columns: dict[str, int] = field(default_factory=dict)


class Forward(NamedTuple):
    """One forward over a tree for each of some rows.

    All trees begin at the column `front`, which is the length of the longest row. `firsts` has, by
    attention type, the column of the first slot: windowed layers may drop columns that no query can
    see any more. A captured forward has a `layout`, which says on the device what Python must not
    know.
    """

    rows: Sequence[KVRow]
    front: int
    firsts: Mapping[str, int]
    layout: Layout | None = None

    @property
    def lengths(self) -> list[int]:
        """The committed columns of each row, padding included."""
        return [row.num_columns for row in self.rows]

    @property
    def positions(self) -> NDArray[Any]:
        """(..., B): the position id of each row's root."""
        return np.stack([row.position for row in self.rows], axis=-1)

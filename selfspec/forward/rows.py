"""What a row of a forward knows of its keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.forward.sizes import ENDLESS


@dataclass(eq=False)
class KVRow:
    """What a row knows of its keys and values, and where its next token is. A `Row` is one."""

    num_columns: int = 0  # that are committed
    max_columns: int = ENDLESS  # The most that it may need in the end.
    start: int = 0  # Columns before this are padding.
    position: NDArray[Any] = field(default_factory=lambda: np.zeros((), np.int64))  # (...,)
    place: int = 0  # The row of slots that belongs to it.
    # For each attention type, the first column that is left of the prompt in transformers' layers.
    first_columns: dict[str, int] = field(default_factory=dict)

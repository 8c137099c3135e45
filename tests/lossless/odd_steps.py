"""Models whose `prepare_inputs_for_generation` does to positions what real ones do, and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.fakes import of_library

MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "shifted": lambda positions: positions + 1,
    "dropped": lambda _positions: None,
    "floats": lambda positions: positions.float(),
    "halves": lambda positions: positions + 0.5,
    "doubled": lambda positions: 2 * positions,
}


def with_odd_steps(model: Any, move: str) -> Any:
    """The model, whose own steps from now on get positions that were moved."""
    stock = model.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = stock(*args, **kwargs)
        if (positions := inputs.get("position_ids")) is not None:
            inputs["position_ids"] = MOVES[move](positions)
        return inputs

    model.prepare_inputs_for_generation = of_library(prepare)
    return model

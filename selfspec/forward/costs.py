"""What a step with a model costs, by its width: learned from steps, as long as its runner lives.

Each curve belongs to a number of rows, a way to run forwards and a range of text lengths. The curve
for another length, or a guess for the kind of device and the precision, says what shape to expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec.cost import CostCurve
from selfspec.forward.backends import Backend
from selfspec.forward.model import device_of
from selfspec.machine.device import calculates_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST_CONTEXT = 128  # All texts shorter than twice this share one curve.
# The guess for what one more query costs, as a share of a plain step. Where weights are read from
# disk or over a bus for each step, queries cost little compared with that. On an H200 a query took
# 0.001 to 0.005. A CPU that can't calculate in half precision takes each query row by row.
_QUERY = {
    "cuda": 0.004,
    "streamed": 0.01,
    "packed": 0.1,
    "row by row": 0.7,
    "other": 0.2,
}


def context_bucket(num_columns: int) -> int:
    """The length of the shortest text that shares a curve with one of `num_columns` tokens.

    >>> [context_bucket(number) for number in (0, 255, 256, 900, 1024)]
    [0, 0, 256, 512, 1024]
    """
    least = 1 << (_doublings(num_columns) - 1)
    return 0 if least == _LEAST_CONTEXT else least


class Costs:
    """All curves of one model."""

    def __init__(self) -> None:
        # Keys: the number of rows and how forwards are run; then the length of the shortest text.
        self.curves: dict[tuple[int, str], dict[int, CostCurve]] = {}

    def curve(self, model: PreTrainedModel, backend: Backend, num_rows: int) -> CostCurve:
        """The curve for a batch at its present length, as far as it is known or expected.

        Runs no forward. Of two threads that ask for a new one, one may learn for itself alone.
        """
        forward = f"{backend.forward_name}{' chain' if backend.chains_only else ''}"
        curves = self.curves.setdefault((num_rows, forward), {})
        first = context_bucket(backend.kv.tree_start)
        if first not in curves:
            curves[first] = (
                nearest(curves, first).of_other_length()
                if curves
                else CostCurve.unknown(_query_of(model, backend))
            )
        return curves[first]


def nearest(curves: Mapping[int, CostCurve], num_columns: int) -> CostCurve:
    """The curve for the length that is nearest to this one."""
    here = _doublings(num_columns)
    return curves[min(tuple(curves), key=lambda first: abs(_doublings(first) - here))]


def _query_of(model: PreTrainedModel, backend: Backend) -> float:
    device = device_of(model)
    # Where streaming or accelerate has put the parts of the model.
    on = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if backend.forward_name == "streamed" or len(on) > 1:
        return _QUERY["streamed"]
    if device.type == "cpu" and backend.forward_name == "packed":
        return _QUERY["packed"]
    if device.type == "cpu" and not calculates_in(model.dtype):
        return _QUERY["row by row"]
    return _QUERY.get(device.type, _QUERY["other"])


def _doublings(num_columns: int) -> int:
    return max(num_columns, _LEAST_CONTEXT).bit_length()

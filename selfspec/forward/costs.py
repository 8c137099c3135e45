"""What a step with a model costs on this machine, by its width: learned from steps, and kept.

Each curve belongs to a model, the devices of its weights, a precision, a batch size, a way to run
forwards and a range of text lengths. What an earlier process wrote down, the curve for another
length, or a guess for the kind of device and the precision say what shape to expect.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from selfspec.cost import CostCurve
from selfspec.forward.backends import Backend
from selfspec.forward.model import device_of
from selfspec.machine.hardware import calculates_in, device_name
from selfspec.machine.measured import find_measured, keep_measured
from selfspec.weights import PackedWeight, is_in_eight_bits

__all__ = ["Costs", "context_bucket", "learned_curve"]

_LEAST_CONTEXT = 128  # All texts shorter than twice this share one curve.
# The guess for what one more query costs, as a share of a plain step. Where weights are read from
# disk or over a bus for each step, queries cost little compared with that. On an H200 a query took
# 0.001 to 0.005. A CPU that can't calculate in half precision takes each query row by row. Kernels
# for quantised weights took 0.03 to 0.18.
_QUERY = {
    "cuda": 0.004,
    "streamed": 0.01,
    "packed": 0.1,
    "quantised": 0.15,
    "row by row": 0.7,
    "other": 0.2,
}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Key = dict[str, str | int]


def context_bucket(num_columns: int) -> tuple[int, int]:
    """The shortest and longest text that share a curve with one of `num_columns` tokens.

    >>> context_bucket(40), context_bucket(300)
    ((0, 255), (256, 511))
    """
    least = 1 << (_doublings(num_columns) - 1)
    return (0 if least == _LEAST_CONTEXT else least), 2 * least - 1


class Costs:
    """All curves that one `SelfSpec` knows. Safe to use from several threads."""

    def __init__(self) -> None:
        self._curves: dict[tuple[Any, ...], tuple[_Key, dict[int, CostCurve]]] = {}
        self._lock = threading.Lock()

    def curve(
        self,
        model: Any,
        backend: Backend,
        num_rows: int,
    ) -> CostCurve:
        """The curve for a batch at its present length, as far as it is known or expected.

        Runs no forward.
        """
        key = _key(model, num_rows, _forward_of(backend))
        first, _ = context_bucket(backend.front)
        with self._lock:
            known = tuple(key.values())
            if known not in self._curves:
                kept = _read(find_measured(key))
                self._curves[known] = key, {i: curve.as_expectation() for i, curve in kept.items()}
            _, curves = self._curves[known]
            if first not in curves:
                if nearest := _nearest(curves, first):
                    curves[first] = nearest.as_expectation()
                else:
                    curves[first] = CostCurve.unknown(_query_of(model, backend))
            return curves[first]

    def keep(self) -> None:
        """Keeps all curves for later processes, with what the steps have taught."""
        with self._lock:
            known = [(key, dict(curves)) for key, curves in self._curves.values()]
        timed = [
            (key, {str(i): curve.as_dict()})
            for key, curves in known
            for i, curve in curves.items()
            if curve.knows_plain
        ]
        if timed:
            keep_measured(timed)


def learned_curve(model: Any, forward: str, num_columns: int) -> CostCurve | None:
    """What calls with one row have learned for a length near this one; None if they did not.

    `forward` is how forwards are run, as `GenerationStats.forward` names it.
    """
    kept = _read(find_measured(_key(model, 1, forward)))
    return _nearest(kept, context_bucket(num_columns)[0])


def _nearest(curves: Mapping[int, CostCurve], first: int) -> CostCurve | None:
    """The curve for the length that is nearest, if there is any."""
    here = _doublings(first)
    return curves[min(curves, key=lambda other: abs(_doublings(other) - here))] if curves else None


def _query_of(model: Any, backend: Backend) -> float:
    """The guess for what one more query costs."""
    device = device_of(model)
    if backend.kind == "streamed" or len(_devices(model)) > 1:
        return _QUERY["streamed"]
    if device.type == "cpu" and backend.kind == "packed":
        return _QUERY["packed"]
    if device.type == "cpu" and not calculates_in(model.dtype):
        return _QUERY["row by row"]
    if _is_quantised(model):
        return _QUERY["quantised"]
    return _QUERY.get(device.type, _QUERY["other"])


def _is_quantised(model: Any) -> bool:
    """Does a model compute from quantised weights? A GGUF may be widened when it is read."""
    if getattr(model, "hf_quantizer", None) is None and not getattr(model, "is_quantized", False):
        return False
    plain = {nn.Parameter, torch.Tensor, PackedWeight}
    tensors = (*model.parameters(), *model.buffers())
    return any(
        type(each) not in plain or (each.dim() > 1 and each.dtype not in _FLOATS)
        for each in tensors
    )


def _doublings(num_columns: int) -> int:
    return max(num_columns, _LEAST_CONTEXT).bit_length()


def _read(kept: Mapping[str, Any]) -> dict[int, CostCurve]:
    """Curves that were kept, by their shortest text. Leaves out what can't be used."""
    curves = {}
    for first, values in kept.items():
        try:
            curves[int(first)] = CostCurve.from_dict(values)
        except ValueError:
            continue
    return curves


def _forward_of(backend: Backend) -> str:
    if not backend.chains_only:
        return backend.kind
    return "chain" if backend.kind == "eager" else f"{backend.kind} chain"


def _key(model: Any, num_rows: int, forward: str) -> _Key:
    """Names and values of all that the cost depends on, except the length of the text."""
    config = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]
    return {
        "measured": "steps",
        "model": f"{type(model).__name__} {config}",
        "dtype": f"{model.dtype}{', 8 bits' * is_in_eight_bits(model)}",
        "device": f"{device_name(device_of(model))}, {torch.get_num_threads()} threads",
        "weights in": _weights_in(model),
        "rows": num_rows,
        "forward": forward,
    }


def _weights_in(model: Any) -> str:
    """Where the weights are: how many parts of the model on which device, or the model's own."""
    parts = sorted(_devices(model).items())
    return ", ".join(f"{number} on {device}" for device, number in parts) or str(device_of(model))


def _devices(model: Any) -> Counter[str]:
    """The parts of a model on each device, as streaming or accelerate distributed them."""
    return Counter(map(str, (getattr(model, "hf_device_map", None) or {}).values()))

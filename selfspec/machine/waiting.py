"""Finds out whether work makes the CPU wait for a device, before that work is captured.

`torch.cuda.set_sync_debug_mode("error")` tells more, but it is a switch of the whole process: a
thread that reads a number meanwhile would fail.
"""

from __future__ import annotations

from typing import Any

import torch

from selfspec.compat.kernels import TorchDispatchMode, copies_between_devices, tree_leaves

__all__ = ["NothingWaits"]

_aten = torch.ops.aten
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_)


class NothingWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, in this thread, an error names what reads a number or a shape from a device.

    So does a copy from one device to another, for which a capture has no place either.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation that waits for nothing."""
        given = kwargs or {}
        if self._has_ours((args, given)) and _waits(func, args, given):
            raise RuntimeError(f"{func} makes the CPU wait for the device")
        outcome = func(*args, **given)
        if func.overloadpacket in copies_between_devices and len(_devices((args, outcome))) > 1:
            raise RuntimeError(f"{func} copies from one device to another")
        return outcome

    def _has_ours(self, values: Any) -> bool:
        return self._device_type in _devices(values)


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func.overloadpacket in _INDEXED:  # Numbers as indices have a shape that is known.
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    knows_size = kwargs.get("output_size") is not None
    return not knows_size and not _WAITING_TAGS.isdisjoint(func.tags)


def _devices(values: Any) -> set[str]:
    return {value.device.type for value in tree_leaves(values) if isinstance(value, torch.Tensor)}

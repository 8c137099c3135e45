"""Weights that code outside must not write, since what it writes would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from selfspec.errors import UnsupportedError

__all__ = ["STREAMED", "FileWeight", "refuse_write", "set_data"]

STREAMED = (
    "the weights of a streamed model can't be written, nor adapters be merged into them: each "
    "forward has what the files hold; edit the model and save it, or load it without max_memory"
)

_PARAMETER: Any = nn.Parameter  # torch types few of its special methods
_DATA: Any = torch.Tensor.data  # Its getter and setter are what `__torch_function__` is given.
# They are named like functions that write.
_HARMLESS = frozenset(("requires_grad_", "__index__", "__invert__"))


class FileWeight(nn.Parameter):
    """A streamed weight: a layer has its values only while it computes.

    Reads as NaN in between. Whatever would write it, or asks for the memory to write to, is
    refused.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_write(func, STREAMED)
        return _PARAMETER.__torch_function__(func, types, args, kwargs or {})


def refuse_write(func: Callable[..., Any], why: str) -> None:
    """Raises if a function of torch writes to a tensor, or gives away its memory."""
    name = getattr(func, "__name__", "")
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if func in (_DATA.__get__, _DATA.__set__) or (is_in_place and name not in _HARMLESS):
        raise UnsupportedError(why)


def set_data(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    """`weight.data = tensor`, also where others may not."""
    _PARAMETER.__torch_function__(_DATA.__set__, (), (weight, tensor), {})

"""torch's compiler: how layers are compiled once for all, and what it needs on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

_BACKEND = "inductor"
# Kinds of layers, twice for one node and more, twice for one row and more, and inference mode.
_MOST_GRAPHS = 64


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for any width; an error where it can't be one graph."""
    return torch.compile(function, dynamic=True, fullgraph=True, backend=_BACKEND)


@contextmanager
def tracing() -> Iterator[None]:
    """Around every call of what `compiled` gave.

    Without the first setting, a layer's own number is a constant of its graph, so that each layer
    becomes another graph. Without the second, so does a width that equals a fixed size, such as the
    number of heads. Without the last, half precision is rounded in other places than by the single
    operations. Captured forwards need torch 2.12, which has all of them.
    """
    import torch._dynamo.config as of_dynamo
    import torch._inductor.config as of_inductor
    import torch.compiler.config as of_compiler
    import torch.fx.experimental._config as of_shapes

    with (
        of_compiler.patch(dynamic_sources=r".*\.layer_idx?$"),  # type: ignore[attr-defined]
        of_shapes.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        of_dynamo.patch(recompile_limit=_MOST_GRAPHS),
        of_inductor.patch(emulate_precision_casts=True),
    ):
        yield


def missing_compiler(device: torch.device) -> str | None:
    """What torch's compiler needs for a device and this machine lacks; None if it is there."""
    is_missing = device.type == "cuda" and find_spec("triton") is None
    return "Triton is not installed" if is_missing else None

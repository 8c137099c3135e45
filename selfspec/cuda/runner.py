"""Forwards of fixed shape over one model, each captured as a graph on first use.

The memory that they read and write outlives the calls: the slots, for each shape a buffer of
inputs, and one buffer of logits for all shapes. The model itself is not held here, so dropping it
frees its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from selfspec.forward.backends import CaptureFailed
from selfspec.forward.layout import InputShape, unpack_inputs
from selfspec.forward.model import AttentionTypes, Logits, logits_of
from selfspec.forward.sizes import Policy
from selfspec.forward.states.slots import Branches
from selfspec.forward.tree_kv import TreeKV
from selfspec.machine.device import Device, Replay

_MULTIPLE = 256  # The width of the tensor that says which columns of a prompt count.
# Powers of two up to this width are captured, and multiples of it above.
_WIDE = 64


def stepped(width: int) -> int:
    """The width of the captured forward that has room for `width` >= 1 queries.

    >>> [stepped(width) for width in (1, 3, 9, 64, 65, 200)]
    [1, 4, 16, 64, 128, 256]
    """
    if width > _WIDE:
        return -(-width // _WIDE) * _WIDE
    return 1 << (width - 1).bit_length()


class ForwardKey(NamedTuple):
    """Everything that the shapes of a forward depend on."""

    shape: InputShape
    num_keys: tuple[tuple[str, int], ...]  # by attention type
    is_padded: bool  # Are there columns that don't count?


class _Captured(NamedTuple):
    """A captured forward, and what its nodes tell of running states in each replay."""

    replay: Replay
    branches: Branches | None  # None for a model without any.


class StaticRunner:
    """Runs forwards of fixed shape; serves one call or session at a time.

    `reason` says why a capture failed. After a failure no other capture is tried. `setting_up` is
    how many seconds of the last `ready` a capture took.
    """

    def __init__(
        self, attention: AttentionTypes, device: Device, torch_device: torch.device
    ) -> None:
        self.kv = TreeKV(attention, Policy(is_fixed=True))
        self.reason: str | None = None
        self.setting_up = 0.0
        self._windows = attention.windows
        self._functions = attention.functions
        self._device = device
        self._torch_device = torch_device
        self._shown: torch.Tensor | None = None  # The tensor that was copied last to `_visible`.
        self._visible = _lasting((0, 1), torch.bool, torch_device)
        self._inputs: dict[InputShape, torch.Tensor] = {}  # (numbers,)
        self._outputs = _lasting((0, 1), torch.float32, torch_device)  # Logits (Q, V) of any shape.
        self._captures: dict[ForwardKey, _Captured] = {}
        self._generation = 0  # of the slots that the replays use

    @property
    def num_bytes(self) -> int:
        """Bytes kept from call to call, without inputs, which are small."""
        branches = [captured.branches for captured in self._captures.values()]
        told = sum(told.nbytes for told in branches if told is not None)
        return self.kv.nbytes + self._outputs.nbytes + told

    def check_memory(self) -> None:
        """Raises an error if forwards over its slots went on eagerly for want of memory."""
        if self.reason is None and not self.kv.policy.is_fixed:
            raise torch.OutOfMemoryError("there is no memory for captured forwards")

    def fitting(self, shape: InputShape) -> InputShape:
        """The shape of the captured forward that has room for inputs of `shape`."""
        rows = min(stepped(shape.rows), max(self.kv.num_rows, shape.rows))
        return shape._replace(rows=rows, width=stepped(shape.width))

    def ready(self, model: Any, shape: InputShape, inputs: torch.Tensor) -> Logits:
        """Sends the inputs of the next forward, and captures it if its shape is new.

        Returns a function that runs the forward and returns its logits (R, W, V). The next forward
        overwrites them. Raises `CaptureFailed`, or `torch.OutOfMemoryError`.
        """
        self._show(shape.rows)
        if self._generation != self.kv.generation:
            self._captures.clear()
            self._generation = self.kv.generation
        if shape not in self._inputs:
            self._inputs[shape] = _lasting(inputs.shape, inputs.dtype, self._torch_device)
        self._device.send(inputs, into=self._inputs[shape])
        num_keys = tuple(self.kv.num_keys(shape.width).items())
        key = ForwardKey(shape, num_keys, self.kv.visible is not None)
        self.setting_up = 0.0
        captured = self._captures.get(key) or self._capture(model, key)

        def forward() -> torch.Tensor:
            captured.replay()
            self.kv.states.branches = captured.branches  # A replay runs no Python to set them.
            queries = shape.rows * shape.width
            return self._outputs[:queries].view(shape.rows, shape.width, -1)

        return forward

    def _show(self, num_rows: int) -> None:
        """Copies the mask of a prompt's columns into the buffer, if it has changed."""
        visible, buffer = self.kv.visible, self._visible
        if visible is None:
            return
        num_columns = visible.shape[1]
        if num_rows > len(buffer) or num_columns > buffer.shape[1]:
            columns = -(-num_columns // _MULTIPLE) * _MULTIPLE
            shape = max(num_rows, self.kv.num_rows, len(buffer)), max(columns, buffer.shape[1])
            buffer = self._visible = _lasting(shape, torch.bool, self._torch_device)
            self._captures.clear()
        elif visible is self._shown:
            return
        buffer.fill_(True)
        buffer[: len(visible), :num_columns] = visible
        self._shown = visible

    def _capture(self, model: Any, key: ForwardKey) -> _Captured:
        if self.reason is None:
            start = perf_counter()
            replay = self._device.capture(self._work(model, key))
            self.setting_up = perf_counter() - start
            if not isinstance(replay, str):
                captured = self._captures[key] = _Captured(replay, self.kv.states.branches)
                return captured
            self.reason = replay
        raise CaptureFailed(self.reason)

    def _work(self, model: Any, key: ForwardKey) -> Callable[[], None]:
        """A function that runs the model over the inputs that were sent; it can be repeated."""

        def work() -> None:
            logits = self._logits(model, key).flatten(0, 1)  # (R * W, V)
            self._make_room(logits)
            self._outputs[: len(logits)].copy_(logits)

        return work

    def _make_room(self, logits: torch.Tensor) -> None:
        """Lets the buffer hold logits (Q, V). What was captured with a smaller one is forgotten."""
        is_alike = self._outputs[:0].shape == logits[:0].shape
        if is_alike and self._outputs.dtype is logits.dtype and len(self._outputs) >= len(logits):
            return
        self._captures.clear()
        self._outputs = self._outputs.new_empty(0)  # The old one is free before there is a new one.
        shape = max(len(logits), _WIDE), logits.shape[1]
        self._outputs = _lasting(shape, logits.dtype, logits.device)

    def _logits(self, model: Any, key: ForwardKey) -> torch.Tensor:
        """The logits (R, W, V) of the inputs that were sent; Python reads no number of them."""
        layout = unpack_inputs(
            self._inputs[key.shape],
            key.shape,
            windows=self._windows,
            num_keys=dict(key.num_keys),
            visible=self._visible if key.is_padded else None,
            dtype=self.kv.placement[0],
        )
        self.kv.forward = self.kv.forward._replace(layout=layout)
        try:
            return logits_of(model, layout, self.kv.cache, self.kv.states, self._functions)
        finally:
            self.kv.forward = self.kv.forward._replace(layout=None)


def _lasting(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that later calls may write to, in inference mode or not."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)

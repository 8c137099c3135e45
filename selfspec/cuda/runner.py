"""Forwards of fixed shape over one model, each captured as a graph on first use.

The memory that they read and write outlives the calls: the slots, and for each shape a buffer of
inputs and one of logits. The model itself is not held here, so dropping it frees its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from selfspec.forward.eager import Logits
from selfspec.forward.layout import InputShape, RowState, read
from selfspec.forward.model import AttentionTypes, logits_of
from selfspec.forward.tree_kv import TreeKV
from selfspec.machine.device import Device, Replay

__all__ = ["ForwardKey", "StaticRunner", "stepped"]

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
    num_keys: tuple[tuple[str, int], ...]  # for each attention type
    dtype: torch.dtype  # the masks' dtype


class StaticRunner:
    """Runs forwards of fixed shape; serves one call at a time.

    `reason` says why a capture failed. After a failure no other capture is tried, and the same
    forwards are run without graphs. `setting_up` is how many seconds of the last `ready` a capture
    took.
    """

    def __init__(
        self, attention: AttentionTypes, device: Device, torch_device: torch.device
    ) -> None:
        self.kv = TreeKV(attention, keeps_slots=True)
        self.reason: str | None = None
        self.setting_up = 0.0
        self._windows = attention.windows
        self._device = device
        self._torch_device = torch_device
        self._visible = torch.ones(0, 1, dtype=torch.bool, device=torch_device)
        self._inputs: dict[InputShape, torch.Tensor] = {}  # (numbers,)
        self._outputs: dict[InputShape, torch.Tensor] = {}  # (R, W, V): the logits
        self._replays: dict[ForwardKey, Replay] = {}
        self._generation = 0  # of the slots that the replays use

    least_room = 4096  # Adding slots voids what was captured.

    @property
    def kind(self) -> str:
        """How forwards are run: ``"graph"``, or ``"eager"`` after a failure."""
        return "graph" if self.reason is None else "eager"

    @property
    def num_rows(self) -> int:
        """The most rows a forward may have; a call may have fewer."""
        return min(self.kv.num_rows, len(self._visible))

    def fitting(self, shape: InputShape) -> InputShape:
        """The shape of the captured forward that has room for inputs of `shape`."""
        rows = min(stepped(shape.rows), max(self.num_rows, shape.rows))
        return shape._replace(rows=rows, width=stepped(shape.width))

    def show(self, visible: torch.Tensor | None, num_rows: int, num_columns: int) -> None:
        """Notes which of a prompt's `num_columns` columns (B, P) count; None if all do."""
        if num_rows > len(self._visible) or num_columns >= self._visible.shape[1]:
            # One more column represents all columns after the prompt, which always count.
            columns = -(-(num_columns + 1) // _MULTIPLE) * _MULTIPLE
            self._visible = _lasting((num_rows, columns), torch.bool, self._torch_device)
            self._replays.clear()
        self._visible.fill_(True)
        if visible is not None:
            self._visible[: len(visible), : visible.shape[1]] = visible

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows except these, which move to the front."""
        self._visible[: len(rows)] = self._visible[list(rows)]

    def ready(self, model: Any, shape: InputShape, inputs: torch.Tensor, state: RowState) -> Logits:
        """Sends the inputs of the next forward, and captures it if its shape is new.

        Returns a function that runs the forward and returns its logits (R, W, V). The next forward
        overwrites them.
        """
        if self._generation != self.kv.generation:
            self._replays.clear()
            self._generation = self.kv.generation
        if shape not in self._inputs:
            self._inputs[shape] = _lasting(inputs.shape, inputs.dtype, self._torch_device)
        self._device.send(inputs, into=self._inputs[shape])
        key = ForwardKey(shape, tuple(self.kv.num_keys(shape.width).items()), self.kv.dtype)
        self.setting_up = 0.0
        work = self._replays.get(key) or self._captured(model, key) or self._work(model, key)

        def forward() -> torch.Tensor:
            work()
            return self._outputs[shape]

        return forward

    def _captured(self, model: Any, key: ForwardKey) -> Replay | None:
        if not self._device.can_capture or self.reason is not None:
            return None
        start = perf_counter()
        captured = self._device.capture(self._work(model, key))
        self.setting_up = perf_counter() - start
        if isinstance(captured, str):
            self.reason = captured
            return None
        self._replays[key] = captured
        return captured

    def _work(self, model: Any, key: ForwardKey) -> Callable[[], None]:
        """A function that runs the model over the inputs that were sent; it can be repeated."""

        def work() -> None:
            logits = self._logits(model, key)
            if key.shape not in self._outputs:
                self._outputs[key.shape] = _lasting(logits.shape, logits.dtype, logits.device)
            self._outputs[key.shape].copy_(logits)

        return work

    def _logits(self, model: Any, key: ForwardKey) -> torch.Tensor:
        """The logits (R, W, V) of the inputs that were sent; Python reads no number of them."""
        layout = read(
            self._inputs[key.shape],
            key.shape,
            windows=self._windows,
            num_keys=dict(key.num_keys),
            visible=self._visible,
            dtype=key.dtype,
        )
        self.kv.layout = layout
        try:
            return logits_of(model, layout, self.kv.cache)
        finally:
            self.kv.layout = None


def _lasting(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that later calls may write to, in inference mode or not."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)

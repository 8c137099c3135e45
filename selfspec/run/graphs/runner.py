"""Forwards of fixed shape over one model, each captured as a graph on first use.

The memory that they read and write outlives the calls: the arenas, and for each shape a buffer of
inputs and one of logits. The model itself is not held here, so dropping it frees its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from selfspec.machine.device import Device, Replay
from selfspec.records import DraftTree
from selfspec.run.backends import logits_of
from selfspec.run.graphs.static_kv import Span, StaticArenas
from selfspec.run.graphs.step_inputs import InputShape, InputWriter, StepState, static_layout
from selfspec.run.layout import Window
from selfspec.run.model import AttentionTypes

__all__ = ["ForwardKey", "StaticRunner"]

_MULTIPLE = 256  # The width of the tensor that says which columns of a prompt count.


class ForwardKey(NamedTuple):
    """Everything that the shapes of a forward depend on."""

    shape: InputShape
    num_keys: tuple[tuple[str, int], ...]  # for each attention type
    dtype: torch.dtype  # the masks' dtype


class StaticRunner:
    """Runs forwards of fixed shape; serves one call at a time.

    `reason` says why a capture failed. After a failure no other capture is tried, and the same
    forwards are run without graphs. `setting_up` has the seconds of the last `ready` that went into
    a capture.
    """

    def __init__(
        self, attention: AttentionTypes, device: Device, torch_device: torch.device
    ) -> None:
        self.arenas = StaticArenas(attention.by_layer)
        self.reason: str | None = None
        self.setting_up = 0.0
        self._windows = attention.windows
        self._device = device
        self._torch_device = torch_device
        self._visible = torch.ones(0, 1, dtype=torch.bool, device=torch_device)
        self._buffers: dict[InputShape, _Buffers] = {}
        self._replays: dict[ForwardKey, Replay] = {}
        self._generation = 0  # the generation of arenas that the replays work on
        self._forward: Callable[[], None] = _no_forward  # what the next `run` calls

    @property
    def kind(self) -> str:
        """How forwards are run: ``"graph"``, or ``"eager"`` after a failure."""
        return "graph" if self.reason is None else "eager"

    @property
    def num_rows(self) -> int:
        """The most rows a forward may have; a call may have fewer."""
        return min(self.arenas.num_rows, len(self._visible))

    def show(self, visible: torch.Tensor | None, num_rows: int, num_columns: int) -> None:
        """Notes which of a prompt's `num_columns` columns (B, P) count; None if all do."""
        if num_rows > len(self._visible) or num_columns >= self._visible.shape[1]:
            # One column more stands for all columns behind the prompt, which always count.
            columns = -(-(num_columns + 1) // _MULTIPLE) * _MULTIPLE
            with torch.inference_mode(False):
                self._visible = torch.ones(
                    num_rows, columns, dtype=torch.bool, device=self._torch_device
                )
            self._replays.clear()
        self._visible.fill_(True)
        if visible is not None:
            self._visible[: len(visible), : visible.shape[1]] = visible

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front."""
        self._visible[: len(rows)] = self._visible[list(rows)]

    def write(self, key: ForwardKey, trees: Sequence[DraftTree], state: StepState) -> None:
        """Writes the inputs of the next forward of this shape."""
        if key.shape not in self._buffers:
            self._buffers[key.shape] = _Buffers(key.shape, self._torch_device)
        buffers = self._buffers[key.shape]
        buffers.written = buffers.writer.write(trees, state)

    def ready(self, model: Any, key: ForwardKey) -> None:
        """Sends the inputs of the next forward, and captures it if its shape is new."""
        if self._generation != self.arenas.generation:
            self._replays.clear()
            self._generation = self.arenas.generation
        buffers = self._buffers[key.shape]
        self._device.send(buffers.written, into=buffers.flat)
        self.setting_up = 0.0
        replay = self._replays.get(key) or self._captured(model, key)
        self._forward = replay or self._work(model, key)

    def run(self, key: ForwardKey) -> torch.Tensor:
        """The logits (R, W, V) of what was sent; the next forward of this shape overwrites them."""
        forward, self._forward = self._forward, _no_forward  # Without a graph it holds the model.
        forward()
        logits = self._buffers[key.shape].logits
        assert logits is not None
        return logits

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
        """A function that runs the model over the inputs that were sent; it may run repeatedly."""
        buffers = self._buffers[key.shape]

        def work() -> None:
            buffers.keep(
                _static_logits(model, self.arenas, self._windows, buffers.flat, self._visible, key)
            )

        return work


def _no_forward() -> None:
    """Stands for a forward between two of them."""


class _Buffers:
    """The buffers of one shape: its inputs on the CPU and on the device, and its logits."""

    def __init__(self, shape: InputShape, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.writer = InputWriter(shape)
            self.written = torch.empty(0, device="cpu")  # What was written last.
            self.flat = torch.zeros(shape.size, dtype=torch.long, device=device)
        self.logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> None:
        """Copies logits to the buffer that every forward of this shape writes to."""
        if self.logits is None:
            with torch.inference_mode(False):
                self.logits = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        self.logits.copy_(logits)


def _static_logits(
    model: Any,
    arenas: StaticArenas,
    windows: Mapping[str, Window],
    flat: torch.Tensor,
    visible: torch.Tensor,
    key: ForwardKey,
) -> torch.Tensor:
    """The logits (R, W, V) of some inputs, whose numbers never pass through Python."""
    num_keys = dict(key.num_keys)
    forward = static_layout(
        flat, key.shape, windows=windows, num_keys=num_keys, visible=visible, dtype=key.dtype
    )
    for name, slots in forward.slots.items():
        arenas.spans[name] = Span(slots, forward.front, num_keys[name])
    logits = logits_of(model, forward.layout, arenas.cache)
    arenas.spans.clear()
    return logits

"""Forwards of fixed shape over one model, captured as graphs, each on first use.

What they read and write outlives the calls: the arenas, and for each shape a frame of inputs and
a buffer of logits. No model is held here, so that one that is dropped frees all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from selfspec.machine.device import Device, Replay
from selfspec.records import DraftTree, Queries
from selfspec.run.attention_types import AttentionTypes
from selfspec.run.backends import logits_of
from selfspec.run.graphs.frames import FramePlaces, FrameShape, FrameWriter, static_layout
from selfspec.run.graphs.static_kv import Span, StaticArenas
from selfspec.run.layout import Window

__all__ = ["ForwardKey", "StaticRunner"]

_MULTIPLE = 256  # of the prompt's columns that are told apart by whether they count


class ForwardKey(NamedTuple):
    """All that the shapes of a forward depend on."""

    shape: FrameShape
    num_keys: tuple[tuple[str, int], ...]  # by attention type
    dtype: torch.dtype  # of the masks


class StaticRunner:
    """Runs forwards of fixed shape; serves one call at a time.

    `reason` says why a capture failed. Then no other is tried, and the same forwards are run
    without.
    """

    def __init__(
        self, attention: AttentionTypes, device: Device, torch_device: torch.device
    ) -> None:
        self.arenas = StaticArenas(attention.by_layer)
        self.reason: str | None = None
        self._windows = attention.windows
        self._device = device
        self._torch_device = torch_device
        self._visible = torch.ones(0, 1, dtype=torch.bool)
        self._buffers: dict[FrameShape, _Buffers] = {}
        self._replays: dict[ForwardKey, Replay] = {}
        self._generation = 0  # of the arenas that the replays work on
        self._forward: Callable[[], None] = lambda: None  # the next one

    @property
    def kind(self) -> str:
        """How forwards are run: ``"graph"``, or ``"eager"`` after a failure."""
        return "graph" if self.reason is None else "eager"

    @property
    def num_rows(self) -> int:
        """How many rows a forward may have, whether or not a call has so many."""
        return min(self.arenas.num_rows, len(self._visible))

    def show(self, visible: torch.Tensor | None, num_rows: int, num_columns: int) -> None:
        """Takes down which columns (B, P) of a prompt count, of so many; None: all do."""
        if num_rows > len(self._visible) or num_columns >= self._visible.shape[1]:
            columns = -(-(num_columns + 1) // _MULTIPLE) * _MULTIPLE  # behind the prompt all count
            with torch.inference_mode(False):
                self._visible = torch.ones(
                    num_rows, columns, dtype=torch.bool, device=self._torch_device
                )
            self._replays.clear()
        self._visible.fill_(True)
        if visible is not None:
            self._visible[: len(visible), : visible.shape[1]] = visible

    def keep_rows(self, rows: Sequence[int]) -> None:
        """The rows that are kept move to the front."""
        self._visible[: len(rows)] = self._visible[list(rows)]

    def write(
        self, key: ForwardKey, trees: Sequence[DraftTree | Queries], places: FramePlaces
    ) -> None:
        """Takes down what the next forward of this shape reads."""
        if key.shape not in self._buffers:
            self._buffers[key.shape] = _Buffers(key.shape, self._torch_device)
        self._buffers[key.shape].writer.write(trees, places)

    def ready(self, model: Any, key: ForwardKey) -> None:
        """Sends what was written for the next forward, and captures it if its shape is new."""
        if self._generation != self.arenas.generation:
            self._replays.clear()
            self._generation = self.arenas.generation
        buffers = self._buffers[key.shape]
        self._device.send(buffers.writer.flat, into=buffers.flat)
        replay = self._replays.get(key) or self._captured(model, key)
        self._forward = replay or self._work(model, key)

    def run(self, key: ForwardKey) -> torch.Tensor:
        """Logits (R, W, V) of what was sent; good until the next forward of this shape."""
        self._forward()
        logits = self._buffers[key.shape].logits
        assert logits is not None
        return logits

    def _captured(self, model: Any, key: ForwardKey) -> Replay | None:
        if not self._device.can_capture or self.reason is not None:
            return None
        captured = self._device.capture(self._work(model, key))
        if isinstance(captured, str):
            self.reason = captured
            return None
        self._replays[key] = captured
        return captured

    def _work(self, model: Any, key: ForwardKey) -> Callable[[], None]:
        """Runs the model over the frame that was sent; again and again, if need be."""
        buffers = self._buffers[key.shape]

        def work() -> None:
            buffers.keep(
                _static_logits(model, self.arenas, self._windows, buffers.flat, self._visible, key)
            )

        return work


class _Buffers:
    """Where the frames of one shape are written, on the CPU and on the device, and its logits."""

    def __init__(self, shape: FrameShape, device: torch.device) -> None:
        self.writer = FrameWriter(shape)
        with torch.inference_mode(False):
            self.flat = torch.zeros(shape.size, dtype=torch.long, device=device)
        self.logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> None:
        """Copies logits to where every forward of this shape leaves them."""
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
    """Logits (R, W, V) of a frame; no step's number passes through Python."""
    num_keys = dict(key.num_keys)
    forward = static_layout(
        flat, key.shape, windows=windows, num_keys=num_keys, visible=visible, dtype=key.dtype
    )
    for name, slots in forward.slots.items():
        arenas.spans[name] = Span(slots, forward.front, num_keys[name])
    logits = logits_of(model, forward.layout, arenas.cache)
    arenas.spans.clear()
    return logits

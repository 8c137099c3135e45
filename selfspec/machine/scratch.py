"""Memory for what is worked out and thrown away again, kept by each thread.

For a system to hand out megabytes of new pages takes longer than to fill them.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["Scratch"]


class Scratch(threading.local):
    """Room for some float32 numbers on a CPU, for `least` of them from the first time on."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._held: torch.Tensor | None = None

    def room(self, *shape: int) -> torch.Tensor:
        """A tensor of this thread; what the last one held is lost."""
        size = torch.Size(shape).numel()
        if self._held is None or len(self._held) < size:
            with torch.inference_mode(False):  # so that both modes may write to it
                self._held = torch.empty(max(size, self._least), dtype=torch.float32, device="cpu")
        return self._held[:size].view(shape)

"""Memory for intermediate results, which each thread keeps and uses again.

Asking the system for megabytes of new pages takes longer than filling them.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["Scratch"]


class Scratch(threading.local):
    """A float32 buffer on the CPU for each thread; the first request gets at least `least`."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._held: torch.Tensor | None = None

    def room(self, *shape: int) -> torch.Tensor:
        """This thread's buffer in a shape; it overwrites what the last call returned."""
        size = torch.Size(shape).numel()
        if self._held is None or len(self._held) < size:
            with torch.inference_mode(False):  # Then both modes may write to it.
                self._held = torch.empty(max(size, self._least), dtype=torch.float32, device="cpu")
        return self._held[:size].view(shape)

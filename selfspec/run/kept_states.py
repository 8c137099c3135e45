"""Copies of the running states of recurrent and hybrid models, for when drafts turn out wrong."""

from __future__ import annotations

from typing import Any

import torch

from selfspec.compat.states import states_of, windows_of

__all__ = ["KeptStates"]


class KeptStates:
    """The states of a KV cache that has read a prompt, as they were before a forward.

    A state can't be cropped, and a forward writes over it. The copies are made once, and change
    places with the states that are given up.
    """

    def __init__(self, kv: Any) -> None:
        self._places = states_of(kv)
        with torch.inference_mode(False):  # Later calls may write to them outside of it.
            self._copies = [torch.empty_like(held[key]) for held, key in self._places]
        self._windows = windows_of(kv)
        self._past: list[Any] = []
        self._num_kept = 0  # How many states the copies still stand for.

    def keep(self) -> None:
        """Copies what the next forward will change."""
        for (held, key), copy in zip(self._places, self._copies, strict=True):
            copy.copy_(held[key])
        self._past = [held[key] for held, key in self._windows]
        self._num_kept = len(self._places)

    def go_back(self) -> None:
        """Puts back what was kept, if it was neither put back nor forgotten since.

        An interrupt may break this off: the next call puts back the rest, and no state twice.
        """
        if self._num_kept:
            for (held, key), past in zip(self._windows, self._past, strict=True):
                held[key] = past
        for index in range(self._num_kept)[::-1]:
            held, key = self._places[index]
            held[key], self._copies[index] = self._copies[index], held[key]
            self._num_kept = index
        self.forget()

    def forget(self) -> None:
        """Lets the states be as the last forward has left them."""
        self._past, self._num_kept = [], 0

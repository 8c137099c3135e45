"""Tokens drawn at all nodes of a step's trees at once, before anybody knows which are visited.

Knows processed scores, depths and noise; not processors, nor walks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from selfspec.machine.device import Device, Fetched, upload
from selfspec.verify.noise import Noise, highest_ratios
from selfspec.verify.tape import NoiseTape

__all__ = ["Drawn", "Nodes"]


class Nodes(NamedTuple):
    """All nodes that a row's walk may reach."""

    row: int  # As in `Visit`.
    forward_index: int
    depths: Sequence[int]  # How many nodes lie above each.


class Drawn:
    """The token behind each node, on its way to the CPU, and the noise that it was drawn with."""

    def __init__(
        self,
        tape: NoiseTape,
        scores: torch.Tensor,  # (N, V): of all nodes, row by row
        asked: Sequence[tuple[Nodes, int]],  # and the step of each row's root
        device: Device,
    ) -> None:
        self._tape, self._like = tape, scores[:1]
        self._places: dict[tuple[int, int], tuple[int, Noise]] = {}  # By row and node.
        self._values: list[list[float]] | None = None
        numbers: list[torch.Tensor] = []
        indices: list[int] = []
        for nodes, step in asked:
            foreseen = self._noises(nodes, step, numbers)
            for node, depth in enumerate(nodes.depths):
                index, noise = foreseen.get(depth, (0, None))
                if noise is not None:  # Else it is too far ahead.
                    self._places[nodes.row, node] = len(indices), noise
                indices.append(index)
        self._fetched: Fetched | None = None
        if numbers:
            of_nodes = torch.stack(numbers)[upload(torch.tensor(indices), scores.device)]
            self._fetched = device.fetch(highest_ratios(scores, of_nodes))

    def token(self, row: int, node: int, step: int) -> int | None:
        """The token behind a node that is visited; None if it has to be drawn there."""
        place = self._places.get((row, node))
        if place is None or self._tape.taken(step, self._like) is not place[1]:
            return None  # Somebody else has drawn in the meantime, or it was too far ahead.
        if self._values is None:
            assert self._fetched is not None
            self._values = self._fetched.get()[0].tolist()
        best, token = (of_all[place[0]] for of_all in self._values)
        return None if math.isnan(best) else int(token)

    def _noises(
        self, nodes: Nodes, step: int, numbers: list[torch.Tensor]
    ) -> dict[int, tuple[int, Noise]]:
        """The noise of each depth, and its index among the `numbers` of all of them."""
        found = {}
        for depth in range(max(nodes.depths) + 1):
            noise = self._tape.foreseen(step + depth, self._like)
            if noise is not None:
                found[depth] = len(numbers), noise
                numbers.append(noise.of_all(nodes.row))
        return found

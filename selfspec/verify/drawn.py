"""Tokens chosen at all nodes of a step's trees at once, before anybody knows which are visited.

Knows trees, scores and noise; processors are callables.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from selfspec.machine.device import Device, Fetched, upload
from selfspec.records import DraftTree
from selfspec.verify.logits import likeliest
from selfspec.verify.noise import Noise, highest_ratios
from selfspec.verify.tape import NoiseTape

__all__ = ["Drawn", "Likeliest", "Nodes", "Processors", "processed"]

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Nodes(NamedTuple):
    """All nodes that a row's walk may reach."""

    row: int  # As in `Visit`.
    forward_index: int
    tree: DraftTree


def processed(
    processors: Processors, prefix: torch.Tensor, tree: DraftTree, scores: torch.Tensor
) -> torch.Tensor:
    """The scores (N, V) of a tree's nodes, processed with the true prefix of each.

    `prefix` (1, L) is the text up to the root. Nodes of the same depth have prefixes of the same
    length, so there is one call for each depth.
    """
    paths: list[list[int]] = [[]]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append([*paths[parent], token])
    nodes = sorted(range(len(tree)), key=tree.depths.__getitem__)
    deepest = tree.depths[nodes[-1]]
    padded = [[node, *paths[node], *[0] * (deepest - tree.depths[node])] for node in nodes]
    table = upload(torch.tensor(padded, device="cpu"), scores.device)  # (N, 1 + deepest)
    counts = Counter(tree.depths)
    outcome = torch.empty_like(scores)
    sizes = [counts[depth] for depth in range(deepest + 1)]
    for depth, part in enumerate(torch.split(table, sizes)):
        ids = torch.cat([prefix.expand(len(part), -1), part[:, 1 : 1 + depth]], dim=1)
        outcome[part[:, 0]] = processors(ids, scores[part[:, 0]])
    return outcome


class Likeliest:
    """The likeliest token behind each node, on its way to the CPU."""

    def __init__(
        self,
        scores: torch.Tensor,  # (N, V): of all nodes, row by row
        asked: Sequence[Nodes],
        device: Device,
    ) -> None:
        starts = itertools.accumulate((len(nodes.tree) for nodes in asked), initial=0)
        self._starts = {nodes.row: start for nodes, start in zip(asked, starts, strict=False)}
        self._fetched = device.fetch(likeliest(scores))
        self._tokens: list[int] | None = None

    def token(self, row: int, node: int, step: int) -> int:
        """The token behind a node."""
        if self._tokens is None:
            self._tokens = self._fetched.get()[0].tolist()
        return self._tokens[self._starts[row] + node]


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
            for node, depth in enumerate(nodes.tree.depths):
                index, noise = foreseen.get(depth, (0, None))
                if noise is not None:  # Else it is too far ahead.
                    self._places[nodes.row, node] = len(indices), noise
                indices.append(index)
        self._fetched: Fetched | None = None
        if numbers:
            of_node = upload(torch.tensor(indices, device="cpu"), scores.device)
            of_nodes = torch.stack(numbers)[of_node]
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
        for depth in range(max(nodes.tree.depths) + 1):
            noise = self._tape.foreseen(step + depth, self._like)
            if noise is not None:
                found[depth] = len(numbers), noise
                numbers.append(noise.of_all(nodes.row))
        return found

"""Tokens chosen at all nodes of a tree at once, before anybody knows which are visited.

Knows trees, scores and noise; processors are callables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch

from selfspec.machine.device import Device, Fetched, upload
from selfspec.records import DraftTree
from selfspec.verify.logits import likeliest
from selfspec.verify.noise import Noise, highest_ratios
from selfspec.verify.tape import NoiseTape

__all__ = ["Drawn", "Likeliest", "Processors", "processed"]

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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

    def __init__(self, scores: torch.Tensor, device: Device) -> None:
        self._fetched = device.fetch(likeliest(scores))  # (N, V): of all nodes
        self._tokens: list[int] | None = None

    def token(self, node: int, step: int) -> int:
        """The token behind a node."""
        if self._tokens is None:
            self._tokens = self._fetched.get()[0].tolist()
        return self._tokens[node]


class Drawn:
    """The token behind each node, on its way to the CPU, and the noise that it was drawn with."""

    def __init__(
        self,
        tape: NoiseTape,
        scores: torch.Tensor,  # (N, V): of all nodes
        tree: DraftTree,
        place: tuple[int, int],  # the row's number on the tape, and the step of the root
        device: Device,
    ) -> None:
        self._tape, self._like = tape, scores[:1]
        (number, step), depths = place, range(max(tree.depths) + 1)
        noises = [tape.foreseen(step + depth, self._like) for depth in depths]
        # The noise of each node; None where it is too far ahead.
        self._noises: list[Noise | None] = [noises[depth] for depth in tree.depths]
        self._fetched: Fetched | None = None
        self._values: list[list[float]] | None = None
        known = [noise for noise in noises if noise is not None]  # All but the deepest.
        if known:
            indices = [min(depth, len(known) - 1) for depth in tree.depths]
            of_node = upload(torch.tensor(indices, device="cpu"), scores.device)
            of_nodes = torch.stack([noise.of_all(number) for noise in known])[of_node]
            self._fetched = device.fetch(highest_ratios(scores, of_nodes))

    def token(self, node: int, step: int) -> int | None:
        """The token behind a node that is visited; None if it has to be drawn there."""
        noise = self._noises[node]
        if noise is None or self._tape.taken(step, self._like) is not noise:
            return None  # Somebody else has drawn in the meantime, or it was too far ahead.
        if self._values is None:
            assert self._fetched is not None
            self._values = self._fetched.get()[0].tolist()
        best, token = (of_all[node] for of_all in self._values)
        return None if math.isnan(best) else int(token)

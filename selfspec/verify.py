"""The walk down a verified tree, and the random numbers that it draws.

At each visited node the model's own next token is chosen as stock `generate()` would choose it;
the walk goes down where a child carries that token and ends where none does. So no draft,
however wrong, can change the text. Knows nothing of where drafts come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from selfspec.records import DraftTree

__all__ = ["NoiseTape", "walk"]


def walk(tree: DraftTree, commit: Callable[[int], tuple[int, bool]]) -> list[int]:
    """The accepted nodes, the root first.

    `commit(node)` chooses and commits the token behind `node`, and says whether the row stops
    with it. It is called once for each node of the path, in order.
    """
    node = 0
    path = [0]
    while True:
        token, stops = commit(node)
        child = tree.children[node].get(token)
        if stops or child is None:
            return path
        node = child
        path.append(node)


class NoiseTape:
    """One exponential noise tensor for each step of a batch, drawn as stock draws it.

    `torch.multinomial(p, 1)` is `(p / q).argmax(-1)` with `q` exponential noise of p's shape:
    same ids, same generator state behind it. Rows of a batch reach a step at different times, so
    a step's noise is drawn when the first row gets there and kept until the last one has used it.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._first_kept = 0
        self._kept: list[torch.Tensor] = []

    def draw(self, probabilities: torch.Tensor, row: int, step: int) -> int:
        """Row `row`'s token of step `step`, out of its `probabilities` (V,)."""
        while step >= self._first_kept + len(self._kept):
            self._kept.append(self._next_noise(probabilities))
        noise = self._kept[step - self._first_kept][row]
        best, token = torch.stack([x.double() for x in (probabilities / noise).max(-1)]).tolist()
        if math.isnan(best):  # a NaN wins; stock refuses it with these words
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return int(token)

    def forget_before(self, step: int) -> None:
        """Frees the noise of the steps that every row has behind it."""
        num_spent = max(min(step - self._first_kept, len(self._kept)), 0)
        del self._kept[:num_spent]
        self._first_kept += num_spent

    def _next_noise(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self._num_rows, like.shape[-1]).exponential_(1)

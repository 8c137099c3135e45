"""Self-Draft's branches: chains of guesses that the model answers beside the tree, in one forward.

Each is a guess at what the model would say next, blind to the tree and to the other branches; the
model's own continuations of it become n-grams for the context (Gao et al., section 3.2). Random
numbers are the branches' own, so that sampling with a seed comes out as without them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from selfspec.draft.sources.grams import GRAM_LENGTH
from selfspec.records import DraftTree, Gram, StepRecord

__all__ = ["Branches"]

_SEED = 0


class Branches:
    """The branches of one row, for as long as its request lasts."""

    def __init__(self, prompt_ids: Sequence[int], num_branches: int, max_length: int) -> None:
        self._random = random.Random(_SEED)
        self._padding = list(prompt_ids)
        self._max_length = max_length
        num_branches = num_branches if prompt_ids else 0
        self.tokens = [self._start() for _ in range(num_branches)]
        self._nodes: list[list[int]] = []  # of each branch in the tree that is being verified
        self._num_before = 0  # The nodes of that tree without them.

    def hang(self, tree: DraftTree, max_depth: int, room: int) -> None:
        """Adds chains of score 0 below the root; a branch shares the nodes that begin as it does.

        What would stand more than `max_depth` tokens behind the root is left out: no text will ever
        reach there. So are branches that would make the tree more than `room` nodes larger.
        """
        self._num_before, self._nodes = len(tree), []
        for branch in self.tokens:
            if len(tree) + len(branch) > self._num_before + room:
                return
            nodes = [0]
            for token in branch[:max_depth]:
                below = tree.children[nodes[-1]].get(token)
                nodes.append(tree.add(nodes[-1], token, 0.0) if below is None else below)
            self._nodes.append(nodes[1:])

    def observe(self, record: StepRecord) -> None:
        """Takes what the model said behind each token of a branch as n-grams; then all move on."""
        if record.top is None or not self._nodes:
            return
        said: list[int] = record.top.ids[:, 0].tolist()
        grams: list[Gram] = []
        for index, nodes in enumerate(self._nodes):
            branch, answers = self.tokens[index][: len(nodes)], [said[node] for node in nodes]
            grams += _grams(branch, answers)
            self.tokens[index] = [*branch, *answers[-1:]][-self._max_length :]
        record.grams = grams
        record.num_branch_queries = len(record.tree) - self._num_before
        self._nodes = []
        self._restart_twins()

    def _start(self) -> list[int]:
        return [self._random.choice(self._padding)]

    def _restart_twins(self) -> None:
        """Two branches that say the same would go on doing so."""
        seen = set()
        for index, branch in enumerate(self.tokens):
            if tuple(branch) in seen:
                self.tokens[index] = self._start()
            seen.add(tuple(branch))


def _grams(branch: list[int], said: list[int]) -> Iterator[Gram]:
    """Behind each of a branch's tokens: the last G - 1 of them and what the model said there."""
    for end, token in enumerate(said, start=1):
        yield (*branch[max(end - GRAM_LENGTH + 1, 0) : end], token)

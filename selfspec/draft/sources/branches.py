"""Self-Draft's branches: short rows of tokens that ride along in the verifying forward.

Each is a guess at what the model would say next, blind to the tree and to the other branches; the
model's own continuations of it become n-grams for the context (Gao et al., section 3.2). Random
numbers are the branches' own, so that sampling with a seed comes out as without them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from selfspec.draft.sources.grams import GRAM_LENGTH
from selfspec.records import DraftTree, Gram, Queries, StepRecord

__all__ = ["Branches"]

_SEED = 0
_MAX_FORESEEN = 1 << 16
# What one of these sources names was known without a branch.
_SAID = ("context", "corpus", "prediction")


class Branches:
    """The branches of one row, for as long as its request lasts."""

    def __init__(self, prompt_ids: Sequence[int], num_branches: int, max_length: int) -> None:
        self._random = random.Random(_SEED)
        self._padding = list(prompt_ids)
        self._max_length = max_length
        self._num_branches = num_branches if prompt_ids else 0
        self.tokens = [self._start() for _ in range(self._num_branches)]
        self._riding: list[list[int]] = []
        # Each token that a branch asked about, with what the model said behind it.
        self._foreseen: set[tuple[int, int]] = set()

    def num_queries(self, max_depth: int) -> int:
        """How many tokens would ride along now."""
        return sum(min(len(branch), max_depth) for branch in self.tokens)

    def num_foreseen(self, record: StepRecord) -> int:
        """Accepted drafts that a branch had foreseen, and that the text had not said before."""
        tree = record.tree
        return sum(
            (tree.tokens[tree.parents[node]], tree.tokens[node]) in self._foreseen
            and not any(evidence.source in _SAID for evidence in tree.evidence[node])
            for node in record.accepted_nodes()
        )

    def pairs(self, root: int) -> list[tuple[int, int]]:
        """The last two tokens at each query of the forward that is under way."""
        return [pair for branch in self._riding for pair in itertools.pairwise([root, *branch])]

    def ride(self, tree: DraftTree, max_depth: int) -> DraftTree | Queries:
        """The tree's queries with those of the branches behind them, if there are any.

        A branch sees the text, the root and itself. What would stand more than `max_depth` tokens
        behind the root is left out: no text will ever reach there.
        """
        if not self.num_queries(max_depth):
            return tree
        queries = Queries(list(tree.tokens), list(tree.parents), list(tree.depths))
        self._riding = [branch[:max_depth] for branch in self.tokens]
        for branch in self._riding:
            first = len(queries.tokens)
            queries.tokens.extend(branch)
            queries.parents.extend(first + i - 1 if i else 0 for i in range(len(branch)))
            queries.depths.extend(range(1, len(branch) + 1))
        return queries

    def take(self, next_ids: Sequence[int]) -> list[Gram]:
        """What the model said behind each token that rode along, as n-grams; then all move on."""
        answers = iter(next_ids)
        grams: list[Gram] = []
        for index, branch in enumerate(self._riding):
            said = list(itertools.islice(answers, len(branch)))
            grams += _grams(branch, said)
            self._foreseen.update(zip(branch, said, strict=True))
            if said:
                self.tokens[index] = [*branch, said[-1]][-self._max_length :]
        self._riding = []
        if len(self._foreseen) > _MAX_FORESEEN:
            self._foreseen.clear()
        self._restart_twins()
        return grams

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

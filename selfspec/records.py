"""The values that cross from stage to stage: candidates, trees, step records.

Holds no policy and imports no torch: ids are ints, tables are numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# The names of a draft model, and of heads that read hidden states, among the sources.
DRAFT_MODEL, HEADS = "draft model", "heads"
# The source of common tokens that noise favours.
COMMON = "common"


# Everything less likely than 1 in 64 shares the last bin.
MAX_BIN = 6


class Evidence(NamedTuple):
    """What a source knows about a candidate, binned, so that equal evidence is counted together.

    `probability_bin` counts halvings of the recorded probability: bin 0 is [0.5, 1], bin 1
    [0.25, 0.5), and so on, up to `MAX_BIN`. `count_bin` tells apart what is otherwise equal, such
    as a share of few cases from one of many. Rank 0 speaks against a candidate: the source did not
    name it.
    """

    source: str
    match_length: int = 0
    rank: int = 1
    count_bin: int = 0
    probability_bin: int = 0


def halvings(chance: float) -> int:
    """The `probability_bin` of a chance.

    >>> halvings(1.0), halvings(0.3), halvings(0.0), halvings(float("nan"))
    (0, 1, 6, 6)
    """
    return int(-log2(max(0.5**MAX_BIN, chance)))  # In this order NaN is unlikely too.


def sources_of(kinds: Iterable[Evidence]) -> list[str]:
    """The sources that name a candidate.

    >>> sources_of([Evidence("lut", rank=2), Evidence("draft model", rank=0)])
    ['lut']
    """
    return [kind.source for kind in kinds if kind.rank]


# The likeliest next tokens after a token, with their probabilities, likeliest first.
Likely = list[tuple[int, float]]

# The noise q of a token: the token that is drawn has the largest p / q.
NoiseOf = Callable[[int], float]


class Draws:
    """How the next tokens of a row will be drawn. This one knows nothing of it: the row is greedy.

    Depth 0 is the token after the committed text, and depth 1 the one after a draft. What is said
    holds for one step.
    """

    temperature: float | None = None  # None: the row is greedy.

    def noise(self, depth: int) -> NoiseOf | None:
        """The noise of every token at a depth; None where it is not known."""
        return None

    def noise_of(self, ids: NDArray[np.int64], depth: int) -> NDArray[np.float64] | None:
        """The same for many tokens at once."""
        return None

    def ranked(self, logits: Any, depth: int) -> Likely | None:
        """The likeliest tokens by `logits` (V,) with p / q of each, the one to be drawn first.

        The largest p counts as 1. None where not all of this is known.
        """
        return None


# One likely next token, and why a source believes so. A tree looks at hundreds of these tuples.
Candidate = tuple[int, Evidence]


class Siblings(NamedTuple):
    """The merged children looked at for one node, best first.

    `cells` say where it is counted what noise made of each one's chance, if that was asked.
    """

    tokens: list[int]
    probabilities: list[float]
    evidence: list[tuple[Evidence, ...]]
    cells: Sequence[int] = ()


@dataclass(slots=True)
class DraftTree:
    """A drafted tree as parallel arrays; node 0 is the root, the last committed token.

    `parents[i] < i`, the root's parent is -1. `children[i]` maps a token to the child that
    carries it. `looked_at[i]` holds every sibling considered below node i, whether or not it
    became a node, or None where node i was never expanded.

    ::

        "the"                     tokens  = [the, cat, dog, sat]
        ├── "cat"                 parents = [ -1,   0,   0,   1]
        │   └── "sat"             depths  = [  0,   1,   1,   2]
        └── "dog"
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    evidence: list[tuple[Evidence, ...]]
    children: list[dict[int, int]]
    looked_at: list[Siblings | None]

    @classmethod
    def of_root(cls, token: int) -> DraftTree:
        """The tree of one node: plain decoding."""
        return cls([token], [-1], [0], [1.0], [()], [{}], [None])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, parent: int, token: int, score: float, evidence: tuple[Evidence, ...] = ()
    ) -> int:
        """Appends a node and returns its index."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        self.evidence.append(evidence)
        self.children[parent][token] = node
        self.children.append({})
        self.looked_at.append(None)
        return node

    def cut(self, num_nodes: int) -> None:
        """Keeps the nodes that were added first; what was looked at below them stays known."""
        for node in range(len(self) - 1, num_nodes - 1, -1):
            del self.children[self.parents[node]][self.tokens[node]]
        for values in (self.tokens, self.parents, self.depths, self.scores):
            del values[num_nodes:]
        del self.evidence[num_nodes:], self.children[num_nodes:], self.looked_at[num_nodes:]


# Is the next node, of some score, worth adding to the tree so far?
Pays = Callable[[DraftTree, float], bool]


class TimeBudget:
    """The time that cursors with work of their own may spend; this class sets no limit."""

    def break_even_tokens(self, seconds: float) -> float:
        """How many tokens of one row a source must bring for some seconds of its own to pay."""
        return 0.0

    def affords(self, seconds: float | None) -> bool:
        """May a source take some seconds to begin? None: nobody knows how many it takes."""
        return True

    def charge(self, seconds: float) -> None:
        """Takes in what a source took to begin."""


class Laps:
    """The seconds of a step by its stages, from the end of one stage to the end of the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._last = clock, clock()

    def end(self, stage: str) -> float:
        """Adds the time since the last end to a stage; returns the time now."""
        now = self._clock()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
        return now

    @property
    def total(self) -> float:
        """The seconds of all stages but "prepare", which serves later steps too."""
        return sum(self.seconds.values()) - self.seconds.get("prepare", 0.0)


class TopK(NamedTuple):
    """The model's K likeliest next tokens after each of N tokens."""

    ids: NDArray[np.int32]  # (N, K), likeliest first
    probabilities: NDArray[np.float16]  # (N, K)

    def at(self, index: Any) -> TopK:
        """A part of the tables, by whatever indexes numpy arrays."""
        return TopK(self.ids[index], self.probabilities[index])


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One row's verified tree and its result, as sources, calibration and callers see it.

    `path` are the accepted nodes, the root first; `committed_ids` the tokens that went to the
    output: the drafts on the path and then the model's own next token, unless the row stopped
    before. Both are empty where drafts led to NaN; only a budget sees such a record. `above` is
    the token in front of the root, -1 if there is none. `top` is None where nobody learns. `states`
    (N, D) is what entered the output head for each node, if a cursor of the row asked for it and
    the forward could tell. `is_padding`: the row had stopped before, and its tokens are pads.
    """

    row: int
    tree: DraftTree
    path: list[int] = field(default_factory=list)
    committed_ids: list[int] = field(default_factory=list)
    above: int = -1
    top: TopK | None = None
    states: Any = None
    is_padding: bool = False

    @property
    def num_accepted(self) -> int:
        """Committed tokens that were drafted."""
        return min(max(len(self.path), 1) - 1, len(self.committed_ids))

    def accepted_nodes(self) -> list[int]:
        """The drafted nodes whose tokens were committed, in order."""
        return self.path[1 : 1 + self.num_accepted]

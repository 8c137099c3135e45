"""Best-first growth of a draft tree under a budget.

The score of a path is s = Π p · δ^(depth-1) · Π α^(rank-1): the product of its tokens'
probabilities, decayed once for each level below the first and once for each rank below the best
sibling. The best-scored place is taken next until the budget is spent (DIAA's dynamic tree).
A node's children are looked for only once they may be next, by a guess at the best one's score:
that is most of a tree's cost, and most nodes are leaves in the end. A child that scores above the
guess comes a little late.

Knows cursors and probabilities; not what a token means, nor what the model will say.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from selfspec.config import SpecConfig
from selfspec.records import DraftTree, Evidence, Siblings
from selfspec.sources import Cursor

__all__ = ["TreeGrower", "merge_candidates"]

Probability = Callable[[tuple[Evidence, ...]], float]
States = dict[int, Any]  # index of a cursor -> its state at a node

_LEAST_HOPE = 0.5  # guessed for a best child whatever its parent: its share of the parent's score


class _Place(NamedTuple):
    """A child that waits for its turn; ordered by score, then by age."""

    negative_score: float
    age: int
    parent: int
    rank: int  # among its siblings, from 0


def merge_candidates(
    cursors: Sequence[Cursor], states: States, probability: Probability, top_k: int
) -> Siblings:
    """Asks each cursor for the children of one node and merges those that name the same token."""
    evidence: dict[int, tuple[Evidence, ...]] = {}
    child_states: dict[int, States] = {}
    for index, state in states.items():
        for token, kind, child_state in cursors[index].expand(state):
            if token in evidence:
                evidence[token] += (kind,)
                child_states[token][index] = child_state
            else:
                evidence[token] = (kind,)
                child_states[token] = {index: child_state}
    probabilities = {token: probability(kinds) for token, kinds in evidence.items()}
    ranked = sorted(probabilities, key=probabilities.__getitem__, reverse=True)[:top_k]
    return Siblings(
        ranked,
        [probabilities[token] for token in ranked],
        [evidence[token] for token in ranked],
        [child_states[token] for token in ranked],
    )


class TreeGrower:
    """Grows one row's trees, step after step; keeps a shape where `update_interval` says so."""

    def __init__(
        self, cursors: Sequence[Cursor], config: SpecConfig, probability: Probability
    ) -> None:
        self._cursors = cursors
        self._config = config
        self._probability = probability
        self._shape: list[tuple[int, int]] = []  # (parent, rank) of each node but the root
        self._num_refills = 0
        self._ages = itertools.count()
        self._states: dict[int, States] = {}  # of the expanded nodes
        self._max_depth = config.max_depth

    def grow(
        self,
        root_token: int,
        max_nodes: int,
        max_depth: int | None = None,
        pays: Callable[[float], bool] | None = None,
    ) -> DraftTree:
        """A tree of at most `max_nodes` nodes; costs one `expand` and O(log n) for each.

        `max_depth` is what this step allows, where that is less than the config does. `pays` is
        asked before each node with its score, and ends the growth where it says no.
        """
        tree = DraftTree.of_root(root_token)
        self._states = {}
        depth = self._config.max_depth
        self._max_depth = depth if max_depth is None else min(depth, max_depth)
        if not self._cursors or max_nodes == 1 or self._max_depth < 1:
            return tree
        if self._shape and self._num_refills + 1 < self._config.update_interval:
            self._num_refills += 1
            self._refill(tree, max_nodes)
        else:
            self._num_refills = 0
            self._grow_best_first(tree, max_nodes, pays)
        return tree

    def _grow_best_first(
        self, tree: DraftTree, max_nodes: int, pays: Callable[[float], bool] | None
    ) -> None:
        self._shape = []
        waiting: list[_Place] = []
        self._expand(tree, 0, waiting)
        while waiting and len(tree) < max_nodes:
            place = heapq.heappop(waiting)
            if tree.looked_at[place.parent] is None:  # a promise
                self._expand(tree, place.parent, waiting)
                continue
            if pays is not None and not pays(-place.negative_score):
                return
            self._push(tree, waiting, place.parent, place.rank + 1)
            node = self._take(tree, place.parent, place.rank, -place.negative_score)
            self._shape.append((place.parent, place.rank))
            if len(tree) < max_nodes and tree.depths[node] < self._max_depth:
                self._promise(tree, node, waiting)

    def _refill(self, tree: DraftTree, max_nodes: int) -> None:
        """Puts the newest candidates into the shape kept from an earlier step."""
        placed = {0: 0}  # node of the kept shape -> node here
        for kept, (kept_parent, rank) in enumerate(self._shape[: max_nodes - 1], start=1):
            parent = placed.get(kept_parent)
            if parent is None or tree.depths[parent] >= self._max_depth:
                continue
            siblings = tree.looked_at[parent] or self._look(tree, parent)
            if rank < len(siblings.tokens):
                score = self._score(tree, parent, rank)
                placed[kept] = self._take(tree, parent, rank, score)

    def _expand(self, tree: DraftTree, node: int, waiting: list[_Place]) -> None:
        self._look(tree, node)
        self._push(tree, waiting, node, 0)

    def _look(self, tree: DraftTree, node: int) -> Siblings:
        states = self._states[node] = self._states_at(tree, node)
        siblings = merge_candidates(self._cursors, states, self._probability, self._config.top_k)
        tree.looked_at[node] = siblings
        return siblings

    def _states_at(self, tree: DraftTree, node: int) -> States:
        """Where each cursor stands at a node; one that did not name its token may follow it."""
        parent = tree.parents[node]
        if parent < 0:
            return {i: cursor.root() for i, cursor in enumerate(self._cursors)}
        above = tree.looked_at[parent]
        assert above is not None
        token = tree.tokens[node]
        named = above.states[above.tokens.index(token)]
        states: States = {}  # in the order of the sources, in which evidence is joined
        for index, state in self._states[parent].items():
            below = named[index] if index in named else self._cursors[index].follow(state, token)
            if below is not None:
                states[index] = below
        return states

    def _promise(self, tree: DraftTree, node: int, waiting: list[_Place]) -> None:
        """Lets the best child of a node wait unseen, as sure as the node itself was."""
        score, above = tree.scores[node], tree.scores[tree.parents[node]]
        hope = max(score / above, _LEAST_HOPE) if above > score else 1.0
        heapq.heappush(waiting, _Place(-score * hope, next(self._ages), node, 0))

    def _push(self, tree: DraftTree, waiting: list[_Place], parent: int, rank: int) -> None:
        """Lets the next sibling wait. Later ones score no higher, so one at a time is enough."""
        siblings = tree.looked_at[parent]
        assert siblings is not None
        if rank >= len(siblings.tokens):
            return
        score = self._score(tree, parent, rank)
        # the first level is expanded by default; below it, threshold τ prunes
        if parent > 0 and score < self._config.threshold:
            return
        heapq.heappush(waiting, _Place(-score, next(self._ages), parent, rank))

    def _score(self, tree: DraftTree, parent: int, rank: int) -> float:
        siblings = tree.looked_at[parent]
        assert siblings is not None
        score = tree.scores[parent] * siblings.probabilities[rank]
        score *= self._config.width_decay**rank
        return score * self._config.depth_decay if parent > 0 else score

    def _take(self, tree: DraftTree, parent: int, rank: int, score: float) -> int:
        siblings = tree.looked_at[parent]
        assert siblings is not None
        return tree.add(parent, siblings.tokens[rank], score, siblings.evidence[rank])

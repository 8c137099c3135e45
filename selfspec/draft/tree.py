"""Best-first growth of a draft tree under a budget.

The score of a path is the product of its tokens' chances, unless a `Shape` says otherwise. The
child with the best score is added next until the budget is spent (DIAA's dynamic tree). To look for
a node's children is most of a tree's cost, and most nodes are leaves in the end. So they are looked
for only once they may be next, by a guess at the best one's score. A child that scores above the
guess is added a little later than it should be.

Knows cursors and probabilities; not what a token means, nor what the model will say.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from selfspec.config import SpecConfig
from selfspec.draft.luck import NoiseTrust
from selfspec.draft.shape import Place, Shape
from selfspec.draft.sources import Cursor
from selfspec.records import DraftTree, Evidence, NoiseAhead, Pays, Siblings

__all__ = ["TreeGrower"]

Probability = Callable[[tuple[Evidence, ...]], float]
# The state of each cursor at a node, by the index of the cursor.
States = dict[int, Any]

# An unseen best child is guessed to have at least this share of its parent's score.
_LEAST_HOPE = 0.5

# A child that waits: its negative turn, age, parent, rank among its siblings from 0, and score.
_Waiting = tuple[float, int, int, int, float]


def merge_candidates(
    cursors: Sequence[Cursor], states: States, probability: Probability
) -> Siblings:
    """Asks each cursor for the children of one node and merges those that name the same token.

    What some do not name is evidence, too, on what those before them named.
    """
    evidence: dict[int, tuple[Evidence, ...]] = {}
    for index, state in states.items():
        candidates = cursors[index].expand(state)
        unnamed = cursors[index].unnamed
        if unnamed is not None and candidates:
            named = {token for token, _ in candidates}
            candidates = [*candidates, *((each, unnamed) for each in evidence if each not in named)]
        for token, kind in candidates:
            evidence[token] = (*evidence[token], kind) if token in evidence else (kind,)
    ranked = [(probability(kinds), token, kinds) for token, kinds in evidence.items()]
    ranked.sort(key=itemgetter(0), reverse=True)
    return Siblings(
        [token for _, token, _ in ranked],
        [sureness for sureness, _, _ in ranked],
        [kinds for _, _, kinds in ranked],
    )


class TreeGrower:
    """Grows one row's trees, step after step.

    Where the row's shape names places, these are filled, and nothing is searched for.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        config: SpecConfig,
        probability: Probability,
        trust: NoiseTrust | None = None,
        shape: Shape | None = None,
    ) -> None:
        self._cursors = cursors
        self._reading = {i: c for i, c in enumerate(cursors) if c.unnamed is not None}
        self._config = config
        self._probability = probability
        self._trust = trust
        self._noise: NoiseAhead | None = None
        self._shape = Shape() if shape is None else shape
        self._ages = itertools.count()
        self._states: dict[int, States] = {}  # By expanded node.
        self._max_depth = config.max_depth

    def grow(
        self,
        root_token: int,
        max_nodes: int,
        max_depth: int | None = None,
        pays: Pays | None = None,
        noise: NoiseAhead | None = None,
    ) -> DraftTree:
        """A tree of at most `max_nodes` nodes; costs one `expand` and O(log n) for each.

        `max_depth` is what this step allows, where that is less than the config does. `pays` is
        asked before each node with the tree and its score, and ends the growth where it says no.
        `noise` tells the noise that the children of nodes of some depth will be drawn with.
        """
        tree = DraftTree.of_root(root_token)
        self._states = {}
        self._noise = noise
        depth = self._config.max_depth
        self._max_depth = depth if max_depth is None else min(depth, max_depth)
        if not self._cursors or max_nodes == 1 or self._max_depth < 1:
            return tree
        if places := self._shape.places():
            self._fill(tree, max_nodes, places)
        else:
            self._shape.keep(self._grow_best_first(tree, max_nodes, pays))
        return tree

    def _grow_best_first(self, tree: DraftTree, max_nodes: int, pays: Pays | None) -> list[Place]:
        places: list[Place] = []
        waiting: list[_Waiting] = []
        self._push(tree, waiting, 0, 0, self._look(tree, 0))
        num_nodes = 1
        while waiting and num_nodes < max_nodes:
            _, _, parent, rank, score = heapq.heappop(waiting)
            siblings = tree.looked_at[parent]
            if siblings is None:  # Only a promise waited: the node's children come now.
                self._push(tree, waiting, parent, 0, self._look(tree, parent))
                continue
            if pays is not None and not pays(tree, score):
                break
            self._push(tree, waiting, parent, rank + 1, siblings)
            node = tree.add(parent, siblings.tokens[rank], score, siblings.evidence[rank])
            num_nodes += 1
            places.append((parent, rank))
            if num_nodes < max_nodes and tree.depths[node] < self._max_depth:
                self._promise(tree, node, waiting)
        return places

    def _fill(self, tree: DraftTree, max_nodes: int, places: Sequence[Place]) -> None:
        """Puts the newest candidates into places; where there are none, nodes are left out."""
        here = {0: 0}  # Maps each numbered place to its node in this tree.
        for kept, (kept_parent, rank) in enumerate(places[: max_nodes - 1], start=1):
            parent = here.get(kept_parent)
            if parent is None or tree.depths[parent] >= self._max_depth:
                continue
            if rank and self._config.top_k == 1:  # A model that takes chains only.
                continue
            siblings = tree.looked_at[parent] or self._look(tree, parent)
            if rank < len(siblings.tokens):
                score = tree.scores[parent] * siblings.probabilities[rank]
                evidence = siblings.evidence[rank]
                here[kept] = tree.add(parent, siblings.tokens[rank], score, evidence)

    def _look(self, tree: DraftTree, node: int) -> Siblings:
        states = self._states[node] = self._states_at(tree, node)
        for index, cursor in self._reading.items():
            if index in states:
                cursor.read(states[index], tree.scores[node])
        siblings = merge_candidates(self._cursors, states, self._probability)
        noise_of = self._noise(tree.depths[node]) if self._noise else None
        if self._trust is not None and noise_of is not None:
            siblings = self._trust.weighed(siblings, noise_of)
        tree.looked_at[node] = siblings
        return siblings

    def _states_at(self, tree: DraftTree, node: int) -> States:
        """Where each cursor stands at a node; in the order of the sources."""
        parent = tree.parents[node]
        if parent < 0:
            return {i: cursor.root() for i, cursor in enumerate(self._cursors)}
        token = tree.tokens[node]
        states: States = {}
        for index, state in self._states[parent].items():
            below = self._cursors[index].follow(state, token)
            if below is not None:
                states[index] = below
        return states

    def _promise(self, tree: DraftTree, node: int, waiting: list[_Waiting]) -> None:
        """Lets the best child of a node wait unseen, as sure as the node itself was."""
        score, above = tree.scores[node], tree.scores[tree.parents[node]]
        hope = max(score / above, _LEAST_HOPE) if above > score else 1.0
        turn = self._shape.turn(score * hope, tree.depths[node] + 1)
        heapq.heappush(waiting, (-turn, next(self._ages), node, 0, 0.0))

    def _push(
        self,
        tree: DraftTree,
        waiting: list[_Waiting],
        parent: int,
        rank: int,
        siblings: Siblings,
    ) -> None:
        """Lets the next sibling wait. Later ones score no higher, so one at a time is enough."""
        # A model that takes chains only gets one child for each node.
        if rank >= len(siblings.tokens) or (rank and self._config.top_k == 1):
            return
        depth = tree.depths[parent] + 1
        score = self._shape.score(tree.scores[parent] * siblings.probabilities[rank], depth, rank)
        if score is not None:
            turn = self._shape.turn(score, depth)
            heapq.heappush(waiting, (-turn, next(self._ages), parent, rank, score))

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
import sys
from collections.abc import Callable, Sequence
from typing import Any

from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.ranking import Ranking
from selfspec.draft.sources import Cursor
from selfspec.records import DraftTree, Evidence, Pays, Siblings

# The state of each cursor at a node, by the index of the cursor.
States = dict[int, Any]

# A node below the root: the number of its parent, and its rank among the parent's candidates from
# 0. Nodes are numbered as in a tree: 0 is the root, and place i is node i + 1.
TreePlace = tuple[int, int]

# A best child that was not looked for yet is guessed to have at least half of its parent's score.
_LEAST_HOPE = 0.5
# Where a candidate is surer than this, a look that takes time is worth what is left beside it.
# Elsewhere it is worth more: the chain that it begins goes on.
_SURE = 0.8

Score = Callable[[float, int, int], float | None]  # of a chance, a depth and a rank
Priority = Callable[[float, int], float]  # of a score and a depth
# A child that waits: its negative priority, age, parent, rank among its siblings from 0, and score.
_Waiting = tuple[float, int, int, int, float]


class TreeGrower:
    """Grows one row's trees, step after step, in a shape: the `grow` of the row's `Shape`.

    It finds here the tree so far, its limits and the row's cursors, and may call `best_first`,
    `fill` and `add`. What `ranking` leaves out becomes no node.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        config: SpecConfig,
        ranking: Ranking,
        shape: Callable[[TreeGrower], object] | None = None,
    ) -> None:
        self.cursors = cursors
        self.tree = DraftTree.of_root(0)
        self.max_nodes = 1
        self.max_depth = config.max_depth
        self.current: Cursor | None = None  # If growing breaks off, its error is of this cursor.
        self._config = config
        self._ranking = ranking
        self._shape = TreeGrower.best_first if shape is None else shape
        self._pays: Pays | None = None
        self._score: Score | None = None  # The score and priority of the tree being grown.
        self._priority: Priority | None = None
        self._waiting: list[_Waiting] = []
        self._ages = itertools.count()
        self._states: dict[int, States] = {}  # One entry per expanded node.

    def grow(
        self,
        root_token: int,
        max_nodes: int,
        max_depth: int = sys.maxsize,
        pays: Pays | None = None,
    ) -> DraftTree:
        """A tree of at most `max_nodes` nodes; costs one `expand` and O(log n) for each.

        `max_depth` is the limit of this step, if it is below that of the config. `pays` is asked
        before each node with the tree and its score, and ends the growth where it says no.
        """
        self.tree = tree = DraftTree.of_root(root_token)
        self._states, self._pays = {}, pays
        self._ranking.begin()
        self.max_nodes, self.max_depth = max_nodes, min(self._config.max_depth, max_depth)
        is_open = max_nodes > 1 and self.max_depth >= 1 and root_token != self._ranking.banned
        if self.cursors and is_open:
            self._shape(self)
        return tree

    def best_first(
        self,
        *,
        score: Score | None = None,
        priority: Priority | None = None,
        max_nodes: int | None = None,
    ) -> list[TreePlace]:
        """Adds the child with the highest priority next; returns the places of those it added.

        Children that are there already stay, and the search goes on below them.

        `score(chance, depth, rank)` is a node's score, or None to leave it out with the siblings
        after it. `chance` is its parent's score times its own chance, `depth` is 1 below the root,
        and `rank` is 0 for the likeliest sibling. A score is at most the chance, which is the
        default. `priority(score, depth)` is the score by default.
        """
        self._score, self._priority, self._waiting = score, priority, []
        max_nodes = self.max_nodes if max_nodes is None else min(max_nodes, self.max_nodes)
        tree, places, waiting = self.tree, list[TreePlace](), self._waiting
        if len(tree) < max_nodes:
            self._push(0, 0, tree.looked_at[0] or self._look(0))
        while waiting and len(tree) < max_nodes:
            _, _, parent, rank, node_score = heapq.heappop(waiting)
            siblings = tree.looked_at[parent]
            if siblings is None:  # Only a promise waited: the node's children come now.
                self._push(parent, 0, self._look(parent))
                continue
            token = siblings.tokens[rank]
            node = tree.children[parent].get(token)
            if node is None:
                if self._config.top_k == 1 and tree.children[parent]:
                    continue
                if self._pays is not None and not self._pays(tree, node_score):
                    break
                node = tree.add(parent, token, node_score, siblings.evidence[rank])
                places.append((parent, rank))
            self._push(parent, rank + 1, siblings)
            if len(tree) < max_nodes and tree.depths[node] < self.max_depth:
                if (below := tree.looked_at[node]) is None:
                    self._promise(node)
                else:
                    self._push(node, 0, below)
        return places

    def fill(self, places: Sequence[TreePlace]) -> None:
        """Puts the newest candidates into places, parents first, as far as there are such."""
        tree = self.tree
        here = {0: 0}  # Maps each numbered place to its node in this tree.
        for place, (above, rank) in enumerate(places[: self.max_nodes - 1], start=1):
            parent = here.get(above)
            if parent is None or tree.depths[parent] >= self.max_depth:
                continue
            siblings = tree.looked_at[parent] or self._look(parent)
            if rank < len(siblings.tokens):
                score = tree.scores[parent] * siblings.probabilities[rank]
                sign = siblings.evidence[rank]
                if (node := self._child(parent, siblings.tokens[rank], score, sign)) is not None:
                    here[place] = node

    def add(self, parent: int, token: int) -> int | None:
        """The child with a token. A new one has score 0: the model's answer there is learned.

        None if there is no room for it, if it does not pay, or if the model can't read it.
        """
        return self._child(parent, token, 0.0, ()) if self._ranking.can_be_read(token) else None

    def _child(
        self, parent: int, token: int, score: float, evidence: tuple[Evidence, ...]
    ) -> int | None:
        """The child with a token; None if there is no room for a new one, or if it does not pay."""
        tree = self.tree
        if (there := tree.children[parent].get(token)) is not None:
            return there
        # A model that takes chains only gets one child for each node.
        is_full = self._config.top_k == 1 and tree.children[parent]
        if is_full or len(tree) >= self.max_nodes or tree.depths[parent] >= self.max_depth:
            return None
        if self._pays is not None and not self._pays(tree, score):
            return None
        return tree.add(parent, token, score, evidence)

    def _look(self, node: int) -> Siblings:
        tree = self.tree
        states = self._states[node] = self._states_at(node)
        self._read(states, tree.scores[node])
        evidence = self._evidence(states)
        self.current = None
        try:
            siblings = self._ranking.ranked(evidence, tree.depths[node])
        except Exception:
            self._blame(states)
            raise
        tree.looked_at[node] = siblings
        return siblings

    def _read(self, states: States, score: float) -> None:
        """Lets the cursors that take time look, unless the others are sure of what comes next."""
        slow = [index for index in states if self.cursors[index].takes_time]
        if slow:
            evidence = self._evidence({i: state for i, state in states.items() if i not in slow})
            known = max(map(self._ranking.probability, evidence.values()), default=0.0)
            if known > _SURE:
                score *= 1 - known
            for index in slow:
                cursor = self.current = self.cursors[index]
                cursor.read(states[index], score)

    def _blame(self, states: States) -> None:
        """Raises the error of the cursor whose candidates are no tokens with evidence.

        If there is none, the error is that of a calibration of the user's own.
        """
        ranking = Ranking(Calibration().probability)
        for index, state in states.items():
            ranking.ranked(self._evidence({index: state}), 0)
        self.current = None

    def _states_at(self, node: int) -> States:
        """The state of each cursor at a node, in the order of the sources."""
        parent, states = self.tree.parents[node], States()
        if parent < 0:
            for index, cursor in enumerate(self.cursors):
                self.current = cursor
                states[index] = cursor.root()
            return states
        token = self.tree.tokens[node]
        for index, state in self._states[parent].items():
            cursor = self.current = self.cursors[index]
            below = cursor.follow(state, token)
            if below is not None:
                states[index] = below
        return states

    def _evidence(self, states: States) -> dict[int, tuple[Evidence, ...]]:
        """What the cursors say of the children of one node, by token.

        What some do not name is evidence, too, on what those before them named. Tokens that can't
        come, as one of them knows, are left out.
        """
        evidence: dict[int, tuple[Evidence, ...]] = {}
        for index, state in states.items():
            cursor = self.current = self.cursors[index]
            candidates, against = cursor.expand(state), cursor.evidence_against
            if against is not None and candidates:
                named = {token for token, _ in candidates}
                unnamed = ((token, against) for token in evidence if token not in named)
                candidates = [*candidates, *unnamed]
            for token, sign in candidates:
                known = evidence.get(token)
                evidence[token] = (sign,) if known is None else (*known, sign)
        for index, state in states.items():
            cursor = self.current = self.cursors[index]
            possible = cursor.possible(state, evidence)
            if possible is not evidence:
                evidence = {token: evidence[token] for token in possible}
        return evidence

    def _promise(self, node: int) -> None:
        """Lets the best child of a node wait unseen, as sure as the node itself was."""
        tree = self.tree
        score, above = tree.scores[node], tree.scores[tree.parents[node]]
        hope = max(score / above, _LEAST_HOPE) if above > score else 1.0
        self._wait(node, 0, score * hope, 0.0)

    def _push(self, parent: int, rank: int, siblings: Siblings) -> None:
        """Lets the next sibling wait. Later ones score no higher, so one at a time is enough."""
        # A model that takes chains only gets one child for each node.
        if rank >= len(siblings.tokens) or (rank and self._config.top_k == 1):
            return
        chance = self.tree.scores[parent] * siblings.probabilities[rank]
        score: float | None = chance
        if self._score is not None:
            score = self._score(chance, self.tree.depths[parent] + 1, rank)
        if score is not None:
            self._wait(parent, rank, score, score)

    def _wait(self, parent: int, rank: int, expected: float, score: float) -> None:
        priority = expected
        if self._priority is not None:
            priority = self._priority(expected, self.tree.depths[parent] + 1)
        heapq.heappush(self._waiting, (-priority, next(self._ages), parent, rank, score))

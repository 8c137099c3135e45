"""EdgeLLM's rules for the tree of a draft model: whose turn it is, and when drafting ends.

Every node is one token. To add a node's children, the draft model reads it, one forward for each
node as in the paper. Scores are products of the draft model's own probabilities. The text that the
large model will write is known beforehand, so that only the draft model has to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from selfspec.records import DraftTree, Likely


class Reader(Protocol):
    """A text as a draft model has read it; nodes are numbered in the order they are read."""

    def extend(self, token_ids: Sequence[int]) -> Likely:
        """Reads further tokens of the text; returns what is likely behind them."""
        ...

    def look(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[Likely]:
        """Reads nodes; returns what is likely behind each."""
        ...

    def keep(self, path: Sequence[int]) -> None:
        """Makes the nodes of a path text and forgets the others."""
        ...


@dataclass
class Fallback:
    """The threshold α under which drafting ends; a branch that was right multiplies it by `factor`.

    `as_written` is the paper's rule: drafting ends after the largest confidence of all branches,
    Tc, fell below α, and Tc moves α (equation 3). Otherwise it is ours: no node below α is drafted
    but the first, and the confidence of the branch that was right moves α.
    """

    as_written: bool
    value: float = 0.01
    factor: float = 0.5

    def refuses(self, tree: DraftTree, score: float) -> bool:
        """Does drafting end before a node of this score?"""
        return not self.as_written and len(tree) > 1 and score < self.value

    def is_over(self, tree: DraftTree) -> bool:
        """Does it end now?"""
        return self.as_written and _tree_confidence(tree) < self.value

    def observe(self, tree: DraftTree, leaf: int, num_correct: int) -> None:
        """Equation 3, by the branch that ends at `leaf`."""
        num_all = tree.depths[leaf]
        confidence = _tree_confidence(tree) if self.as_written else tree.scores[leaf]
        if num_correct == num_all:
            self.value *= self.factor
        else:
            self.value /= max(confidence, 1e-6) ** ((num_all - num_correct) / num_all)
        self.value = min(max(self.value, 1e-6), 0.99)


class Rule(NamedTuple):
    """Best-first takes the likeliest path; the pacer the branch that lacks most of its length.

    In equations 1 and 2, a branch of confidence C in a tree of M tokens should have M·C of them.
    What a branch is before it has a token of its own is left open there: here every candidate is
    one, and as long as the path that it would go on with.
    """

    max_nodes: int
    order: str = "best-first"  # or "pacer" or "chain"
    fallback: Fallback | None = None

    def turn(self, depth: int, rank: int, score: float) -> float:
        """The candidate with the largest number is added next."""
        if self.order == "chain" and rank:
            return -1.0
        return self.max_nodes * score - depth if self.order == "pacer" else score


@dataclass
class Counted:
    """What came of a text."""

    num_tokens: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    num_forwards: int = 0
    num_first: int = 0  # Steps whose first token the draft model had named first.
    promised: float = 0.0  # The sum of all scores: how many drafts should come true.

    def add(self, tree: DraftTree, num_tokens: int, num_forwards: int, is_first: bool) -> None:
        self.num_tokens += num_tokens
        self.num_steps += 1
        self.num_nodes += len(tree) - 1
        self.num_forwards += num_forwards
        self.num_first += is_first
        self.promised += sum(tree.scores[1:])

    def __iadd__(self, other: Counted) -> Counted:
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)
        return self

    @property
    def tokens_per_step(self) -> float:
        """Its own token among them."""
        return self.num_tokens / self.num_steps

    @property
    def means(self) -> list[float]:
        """Tokens, nodes, their scores and forwards of a step."""
        counts = (self.num_tokens, self.num_nodes, self.promised, self.num_forwards)
        return [count / self.num_steps for count in counts]

    def speed_up(self, cost: float) -> float:
        """Over plain steps, if a forward of the draft model takes this share of one."""
        return self.num_tokens / (self.num_steps + cost * self.num_forwards)


def drafted(reader: Reader, prompt: Sequence[int], text: Sequence[int], rule: Rule) -> Counted:
    """Decodes a text that is known, with drafts by a rule."""
    counted, at = Counted(), 1  # The prompt's forward yields the first token.
    likely = reader.extend([*prompt, text[0]])
    while at < len(text):
        growing = _Growing(text[at - 1], likely, rule)
        growing.grow(reader)
        path = _path(growing.tree, text[at:])
        if rule.fallback is not None:
            leaf = _leaf_below(growing.tree, path[-1])
            rule.fallback.observe(growing.tree, leaf, len(path) - 1)
        counted.add(growing.tree, len(path), growing.num_read + 1, likely[0][0] == text[at])
        read = [node for node in path if node <= growing.num_read]
        reader.keep(read)
        likely = reader.extend(text[at + len(read) - 1 : at + len(path)])
        at += len(path)
    return counted


class _Growing:
    """A tree that a rule grows, one read node after the other."""

    def __init__(self, root: int, first: Likely, rule: Rule) -> None:
        self.tree = DraftTree.of_root(root)
        self._likely = [first]  # Behind each node that was read.
        self._ranks = {0: 0}  # Of the next child of each node that has one left.
        self._rule = rule

    @property
    def num_read(self) -> int:
        """How many nodes were read besides the root: all but the last one."""
        return len(self._likely) - 1

    def grow(self, reader: Reader) -> None:
        rule, fallback = self._rule, self._rule.fallback
        while True:
            parent = max(self._ranks, key=self._turn)
            score = self._score(parent)
            if fallback is not None and fallback.refuses(self.tree, score):
                return
            node = self._add(parent, score)
            is_over = fallback is not None and fallback.is_over(self.tree)
            if is_over or len(self.tree) > rule.max_nodes:
                return
            self._likely += reader.look([self.tree.tokens[node]], [parent])
            self._ranks[node] = 0

    def _add(self, parent: int, score: float) -> int:
        rank = self._ranks[parent]
        if rank + 1 < len(self._likely[parent]):
            self._ranks[parent] = rank + 1
        else:
            del self._ranks[parent]
        return self.tree.add(parent, self._likely[parent][rank][0], score)

    def _turn(self, parent: int) -> float:
        depth, rank = self.tree.depths[parent], self._ranks[parent]
        return self._rule.turn(depth, rank, self._score(parent))

    def _score(self, parent: int) -> float:
        """Of the next child of a node."""
        return self.tree.scores[parent] * self._likely[parent][self._ranks[parent]][1]


def _path(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """The nodes that the text goes along, from the root on."""
    path = [0]
    for token in text[:-1]:  # The last token is the large model's own.
        below = tree.children[path[-1]].get(token)
        if below is None:
            break
        path.append(below)
    return path


def _leaf_below(tree: DraftTree, node: int) -> int:
    while tree.children[node]:
        node = min(tree.children[node].values())
    return node


def _tree_confidence(tree: DraftTree) -> float:
    """The largest confidence of a whole branch."""
    ends = (n for n in range(1, len(tree)) if not tree.children[n])
    return max((tree.scores[n] for n in ends), default=1.0)

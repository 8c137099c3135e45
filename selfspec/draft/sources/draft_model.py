"""A small model's guesses: its likeliest next tokens, with their probabilities as evidence.

The tree is read level by level. When children of a node are wanted that was not read yet, one
forward of the small model reads this node and the best others that may be asked about next. Knows
tokens and probabilities; the model itself is behind `ModelText`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2
from time import perf_counter
from typing import Protocol

from selfspec.records import DRAFT_MODEL, Candidate, Evidence, Likely, StepRecord

__all__ = ["DraftModelCursor", "ModelText", "Pace"]

# At most this many nodes are read in one forward.
_LEVEL = 4
# From so likely on, candidates are kept apart more finely than by halves.
_SURE = (0.75, 0.9, 0.97)
_LEAST = 1 / 128
_MAX_BIN = 6
# The rank of what was not named is 0, so that statistics leave it out.
_UNNAMED = Evidence(DRAFT_MODEL, rank=0, probability_bin=_MAX_BIN)


class ModelText(Protocol):
    """A text as a model has read it; nodes are numbered as they are read, the text's end is 0."""

    setting_up: float  # Of the seconds of the last reading, those that later ones will use too.

    @property
    def room(self) -> float:
        """How many tokens the model can still read."""
        ...

    def pays_to_begin(self, num_tokens: int, num_left: float) -> bool:
        """Is a prompt of `num_tokens` tokens worth reading, with `num_left` still to write?"""
        ...

    def extend(self, token_ids: Sequence[int]) -> Likely:
        """Reads further tokens of the text; returns what is likely behind them."""
        ...

    def look(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[Likely]:
        """Reads nodes in one forward; returns what is likely behind each."""
        ...

    def keep(self, path: Sequence[int]) -> None:
        """Makes the nodes of a path text and forgets the others."""
        ...


class Pace(Protocol):
    """Decides how often the model is asked."""

    def pays_to_read(self, scores: Sequence[float]) -> bool:
        """Is a forward over nodes with these scores worth its time?"""
        ...

    def observe_reading(self, seconds: float, num_tokens: int, setting_up: float) -> None:
        """Learns what a forward over this many tokens took, and setting it up besides."""
        ...


@dataclass(slots=True, eq=False)
class Node:
    """A token behind the committed text, drafted or only looked at; `number` is None until read."""

    token: int
    depth: int = 0
    parent: Node | None = None
    number: int | None = None
    candidates: list[Candidate] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)


class DraftModelCursor:
    """The tree of one row as its draft model sees it.

    Reads nothing until it is asked: neither the prompt, nor what was committed while it rested.
    `num_left` is how many tokens may still be written; if they are too few, nothing is read.
    """

    def __init__(
        self,
        text: ModelText,
        prompt_ids: Sequence[int],
        pace: Pace,
        num_left: float = float("inf"),
    ) -> None:
        self._text = text
        self._pace = pace
        self._num_left = num_left
        self._unread = list(prompt_ids)  # The committed tokens that the model has yet to read.
        self._root = Node(self._unread[-1] if self._unread else 0)
        self._num_read = 1
        self._has_prompt = False
        self._begins: bool | None = None  # Is the prompt worth reading? Asked once.

    def root(self) -> Node:
        """The last committed token."""
        return self._root

    def follow(self, state: Node, token: int) -> Node:
        """Any token may be read."""
        child = state.children.get(token)
        if child is None:
            child = state.children[token] = Node(token, state.depth + 1, state)
        return child

    def expand(self, state: Node) -> list[Candidate]:
        """What the model named behind a node, if it was read."""
        return state.candidates

    def unnamed(self, state: Node) -> Evidence | None:
        """If a node was read, tokens that were not named behind it are unlikely."""
        return None if state.number is None else _UNNAMED

    def prepare(self, states: Sequence[Node], scores: Sequence[float]) -> None:
        """Reads the first node, and others in the same forward, if that pays; the best first."""
        if not self._can_read(states[0]):
            return
        if self._begins is None:
            self._begins = self._text.pays_to_begin(len(self._unread), self._num_left)
        if not self._begins:
            return
        chosen = [
            (node, score)
            for node, score in zip(states, scores, strict=True)
            if self._can_read(node)
        ][:_LEVEL]
        if self._pace.pays_to_read([score for _, score in chosen]):
            start = perf_counter()
            num_tokens = self._read([node for node, _ in chosen])
            setting_up = self._text.setting_up
            # To read the prompt is part of the price of having a draft model.
            if self._has_prompt:
                seconds = perf_counter() - start - setting_up
                self._pace.observe_reading(seconds, num_tokens, setting_up)
            self._has_prompt = True

    def observe(self, record: StepRecord) -> None:
        """Keeps of what was read all that became text."""
        self._num_left -= len(record.committed_ids)
        node, path = self._root, [0]
        for token in record.committed_ids if node.number is not None else ():
            child = node.children.get(token)
            if child is None or child.number is None:
                break
            node = child
            path.append(child.number)
        if self._root.number is None:
            self._unread += record.committed_ids
        else:
            self._text.keep(path)
            self._unread = list(record.committed_ids[len(path) - 1 :])
        self._root = Node(record.committed_ids[-1])
        if not self._unread:
            self._root.number, self._root.candidates = 0, node.candidates
        self._num_read = 1

    def _can_read(self, node: Node) -> bool:
        """Was a node not read yet, though the one above it was, and are there positions for it?"""
        if node.number is not None or len(self._unread) + node.depth > self._text.room:
            return False
        return bool(self._unread) if node.parent is None else node.parent.number is not None

    def _read(self, nodes: Sequence[Node]) -> int:
        """One forward; returns how many tokens it read."""
        if self._root.number is None:
            num_tokens = len(self._unread)
            self._take(self._root, 0, self._text.extend(self._unread))
            self._unread = []
            return num_tokens
        above = (node.parent.number for node in nodes if node.parent is not None)
        parents = [number for number in above if number is not None]
        found = self._text.look([node.token for node in nodes], parents)
        for number, (node, likely) in enumerate(zip(nodes, found, strict=True), self._num_read):
            self._take(node, number, likely)
        self._num_read += len(nodes)
        return len(nodes)

    def _take(self, node: Node, number: int, likely: Likely) -> None:
        node.number = number
        node.candidates = [
            (token, _evidence(rank, *_bins(chance)))
            for rank, (token, chance) in enumerate(likely, 1)
            if chance >= _LEAST
        ]


def _bins(chance: float) -> tuple[int, int]:
    """How many times a probability is halved, and how many of the sure bounds it reaches.

    >>> _bins(0.95), _bins(0.5), _bins(0.2)
    ((0, 2), (1, 0), (2, 0))
    """
    return min(int(-log2(chance)), _MAX_BIN), sum(chance >= bound for bound in _SURE)


@lru_cache(maxsize=1024)
def _evidence(rank: int, probability_bin: int, sureness: int) -> Evidence:
    return Evidence(DRAFT_MODEL, 0, rank, sureness, probability_bin)

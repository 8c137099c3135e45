"""The values that cross from stage to stage: candidates, trees, step records, statistics.

Holds no policy and imports no torch: ids are ints, tables are numpy arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ONCE_A_CALL",
    "Candidate",
    "DraftTree",
    "Entries",
    "Evidence",
    "GenerationStats",
    "Gram",
    "Lesson",
    "Queries",
    "Siblings",
    "StepRecord",
    "TopK",
]


ONCE_A_CALL = ("prefill", "plain", "profile")  # clocks of what belongs to no step

Gram = tuple[int, ...]  # two tokens or more; the first is its key


class Evidence(NamedTuple):
    """What a source knows about a candidate, binned, so that equal evidence is counted together.

    `probability_bin` counts halvings of the recorded probability: bin 0 is [0.5, 1], bin 1
    [0.25, 0.5), and so on. `count_bin` tells how much a counted one rests on.
    """

    source: str
    match_length: int = 0
    rank: int = 1
    count_bin: int = 0
    probability_bin: int = 0


# one likely next token, and why a source believes so; plain, for a tree looks at hundreds
Candidate = tuple[int, Evidence]


class Siblings(NamedTuple):
    """The merged children looked at for one node, best first."""

    tokens: list[int]
    probabilities: list[float]
    evidence: list[tuple[Evidence, ...]]


@dataclass(slots=True)
class DraftTree:
    """A drafted tree as parallel arrays; node 0 is the root, the last committed token.

    `parents[i] < i`, the root's parent is -1. `children[i]` maps a token to the child that
    carries it. `looked_at[i]` holds every sibling considered below node i, whether or not it
    won a place, or None where node i was never expanded.

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
        for held in (self.tokens, self.parents, self.depths, self.scores):
            del held[num_nodes:]
        del self.evidence[num_nodes:], self.children[num_nodes:], self.looked_at[num_nodes:]

    def check(self) -> None:
        """Asserts every invariant; for tests and for sources under development."""
        assert self.parents[0] == -1
        assert self.depths[0] == 0
        for node in range(1, len(self)):
            parent = self.parents[node]
            assert 0 <= parent < node
            assert self.depths[node] == self.depths[parent] + 1
            assert self.children[parent].get(self.tokens[node]) == node
            assert self.scores[node] <= self.scores[parent] + 1e-12
        assert sum(map(len, self.children)) == len(self) - 1


class Queries(NamedTuple):
    """What one row asks the model in one forward, as parallel lists like a tree's.

    A tree's nodes come first; what rides along behind them hangs on the root, and is nobody's
    child.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]


class TopK(NamedTuple):
    """The model's K likeliest next tokens at each of N places."""

    ids: NDArray[np.int32]  # (N, K), likeliest first
    probabilities: NDArray[np.float16]  # (N, K)

    def at(self, places: Any) -> TopK:
        """The tables at some places only, named as numpy indexes arrays."""
        return TopK(self.ids[places], self.probabilities[places])

    def rows(self) -> list[Entries]:
        """The table of each place."""
        num_places, k = self.ids.shape
        ids = np.ascontiguousarray(self.ids).reshape(-1).data
        halves = np.ascontiguousarray(self.probabilities).reshape(-1).view(np.uint16).data
        starts = range(0, num_places * k, k)
        return [(ids[start : start + k], halves[start : start + k]) for start in starts]


# one row of a `TopK` as Python copies it fastest: ids of int32, and the bits of each probability
Entries = tuple[memoryview, memoryview]


class Lesson(NamedTuple):
    """What the model said at each node of a tree, the accepted ones last: they win over others.

    The tokens of the nodes, the token above each (-1 above the root), and what came behind.
    """

    tokens: list[int]
    above: list[int]
    entries: list[Entries]


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What came of one verified tree of one row: what sources, calibration and listeners see.

    `path` are the accepted nodes, the root first; `committed_ids` the tokens that went to the
    output: the drafts on the path and then the model's own next token, unless the row stopped
    before. `top` is None where nobody learns. `grams` are what branches yielded in the same
    forward, for which they took `num_branch_queries`; `num_from_branches` counts the accepted
    drafts that the row knew from its branches alone.
    """

    row: int
    tree: DraftTree
    path: list[int]
    committed_ids: list[int]
    top: TopK | None = None
    grams: Sequence[Gram] = ()
    num_branch_queries: int = 0
    num_from_branches: int = 0
    _lesson: Lesson | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def lesson(self) -> Lesson | None:
        """What is to be learned, in lists that are made once; None where nobody learns."""
        if self._lesson is None and self.top is not None:
            self._lesson = self._arranged(self.top)
        return self._lesson

    @property
    def num_accepted(self) -> int:
        """Committed tokens that were drafted."""
        return min(len(self.path) - 1, len(self.committed_ids))

    def accepted_nodes(self) -> list[int]:
        """The drafted nodes whose tokens were committed, in order."""
        return self.path[1 : 1 + self.num_accepted]

    def _arranged(self, top: TopK) -> Lesson:
        tree = self.tree
        on_path = set(self.path)
        order = [node for node in range(len(tree)) if node not in on_path] + self.path
        parents = [tree.parents[node] for node in order]
        rows = top.rows()
        return Lesson(
            [tree.tokens[node] for node in order],
            [tree.tokens[parent] if parent >= 0 else -1 for parent in parents],
            [rows[node] for node in order],
        )


@dataclass(slots=True)
class GenerationStats:
    """Counts and times of one or more `generate()` calls; `+` merges them.

    `num_steps` counts a forward once for each row in it, without the prompt's. `tokens_per_step`
    is therefore 1 for plain decoding, whatever the batch, and its numerator leaves out the
    tokens that the prompt's forward yields. A token named by two sources counts for both.
    `forward` is how the last call ran the model over drafts, ``"eager"``, ``"turned"``,
    ``"native"`` (code of our own, turned where that is faster), ``"packed"``, ``"graph"`` or
    ``"compiled"``; `eager_reason` why it was not as asked; `rounding` the nearest to what was asked
    that could be had. Of the last call that drafted, `table_bytes` is what the LUTs take,
    `packed_bytes` second copies of weights.
    """

    num_calls: int = 0
    num_new_tokens: int = 0
    num_prompt_tokens_out: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    num_branch_queries: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    disabled_reason: str | None = None
    forward: str = "eager"
    eager_reason: str | None = None
    rounding: str = "free"
    table_bytes: int = 0
    packed_bytes: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a forward after the prompt's yields on average; 0.0 before the first."""
        return (self.num_new_tokens - self.num_prompt_tokens_out) / max(self.num_steps, 1)

    @property
    def nodes_per_step(self) -> float:
        """Mean number of verified nodes, the root included."""
        return self.num_nodes / max(self.num_steps, 1)

    @property
    def queries_per_step(self) -> float:
        """Mean width of a row's part of a forward: its nodes and what branches ask beside them."""
        return (self.num_nodes + self.num_branch_queries) / max(self.num_steps, 1)

    @property
    def overhead(self) -> float:
        """Share of the decoding time that is not the forward."""
        decoding = sum(v for k, v in self.seconds.items() if k not in ONCE_A_CALL)
        return 1 - self.seconds["forward"] / decoding if decoding else 0.0

    def count_step(self, record: StepRecord) -> None:
        """Adds one verified tree of one row."""
        self.num_steps += 1
        self.num_nodes += len(record.tree)
        self.num_branch_queries += record.num_branch_queries
        self.num_new_tokens += len(record.committed_ids)
        self.accepted_lengths[record.num_accepted] += 1
        _count_sources(self.drafted_by_source, record.tree, range(1, len(record.tree)))
        _count_sources(self.accepted_by_source, record.tree, record.accepted_nodes())

    def __add__(self, other: GenerationStats) -> GenerationStats:
        if not isinstance(other, GenerationStats):
            return NotImplemented
        return GenerationStats(
            num_calls=self.num_calls + other.num_calls,
            num_new_tokens=self.num_new_tokens + other.num_new_tokens,
            num_prompt_tokens_out=self.num_prompt_tokens_out + other.num_prompt_tokens_out,
            num_steps=self.num_steps + other.num_steps,
            num_nodes=self.num_nodes + other.num_nodes,
            num_branch_queries=self.num_branch_queries + other.num_branch_queries,
            accepted_lengths=self.accepted_lengths + other.accepted_lengths,
            drafted_by_source=self.drafted_by_source + other.drafted_by_source,
            accepted_by_source=self.accepted_by_source + other.accepted_by_source,
            seconds=self.seconds + other.seconds,
            disabled_reason=other.disabled_reason or self.disabled_reason,
            forward=other.forward if other.num_calls else self.forward,
            eager_reason=other.eager_reason or self.eager_reason,
            rounding=other.rounding if other.num_calls else self.rounding,
            table_bytes=other.table_bytes or self.table_bytes,
            packed_bytes=other.packed_bytes or self.packed_bytes,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.num_new_tokens} new tokens in {self.num_steps} steps: "
            f"{self.tokens_per_step:.2f} tokens per step, {self.nodes_per_step:.1f} nodes verified",
        ]
        if self.num_branch_queries:
            lines.append(f"  with branches {self.queries_per_step:.1f} queries a step")
        if self.disabled_reason:
            lines.append(f"not drafted as asked: {self.disabled_reason}")
        if self.forward != "eager" or self.eager_reason or self.rounding != "free":
            rounding = f", rounding {self.rounding}" if self.rounding != "free" else ""
            reason = f": {self.eager_reason}" if self.eager_reason else ""
            copies = f", {self.packed_bytes / 1e6:.0f} MB of copies" if self.packed_bytes else ""
            lines.append(f"  {self.forward} forwards{rounding}{copies}{reason}")
        for name, drafted in sorted(self.drafted_by_source.items()):
            lines.append(f"  {name:<8} {self.accepted_by_source[name]} of {drafted} accepted")
        lines += self._histogram_lines()
        total = sum(self.seconds.values())
        stages = ", ".join(f"{k} {v:.3f}" for k, v in self.seconds.items())
        return "\n".join([*lines, f"  {total:.3f} s: {stages}"] if total else lines)

    def _histogram_lines(self) -> list[str]:
        steps = sum(self.accepted_lengths.values())
        if not steps:
            return []
        shares = (f"{n}: {c / steps:.0%}" for n, c in sorted(self.accepted_lengths.items()))
        return [f"  drafts accepted in a step: {', '.join(shares)}"]


def _count_sources(counter: Counter[str], tree: DraftTree, nodes: Sequence[int]) -> None:
    for node in nodes:
        for evidence in tree.evidence[node]:
            counter[evidence.source] += 1

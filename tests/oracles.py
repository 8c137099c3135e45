"""Slow, obvious answers to what the package computes fast.

Nothing here shares code with selfspec: plain loops over plain lists, one question a function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# -- masks -------------------------------------------------------------------------------------


@dataclass
class MaskOracle:
    """Who sees whom in one row of a forward, by walking from each node up to its root."""

    parents: Sequence[int]
    length: int  # committed columns, padding included
    hidden: Collection[int] = ()  # padded columns
    kind: str = "full"
    size: int = 0

    def ancestry(self, node: int) -> list[int]:
        """The node itself, its parent, and so on up to the root; a padding row is the root."""
        if node >= len(self.parents):
            return [0]
        line = []
        while node >= 0:
            line.append(node)
            node = self.parents[node]
        return line

    def column(self, node: int) -> int:
        """The column that a node would have if its path were committed."""
        return self.length + len(self.ancestry(node)) - 1

    def near(self, query: int, key: int) -> bool:
        """Is a key column within the window of a query column?"""
        if self.kind == "sliding":
            return query - key < self.size
        if self.kind == "chunked":
            start = min(set(range(self.length + 1)) - set(self.hidden))
            return (query - start) // self.size == (key - start) // self.size
        return True

    def sees_column(self, node: int, column: int) -> bool:
        """Does a node see a committed column?"""
        exists = column < self.length and column not in self.hidden
        return exists and self.near(self.column(node), column)

    def sees_node(self, node: int, other: int) -> bool:
        """Does a node see another node of its tree?"""
        above = other in self.ancestry(node)
        return above and self.near(self.column(node), self.column(other))


# -- trees -------------------------------------------------------------------------------------


class Path(NamedTuple):
    """A place where a node may stand."""

    tokens: tuple[int, ...]
    score: float


Table = dict[int, list[tuple[int, float]]]  # last token -> its next tokens with probabilities


@dataclass
class GrowthOracle:
    """Every path that a tree may hold, scored one by one, the best first."""

    tables: Sequence[Table]  # one a source
    follows: Sequence[bool]  # which of them go on behind a token that another one named
    max_depth: int
    top_k: int
    depth_decay: float
    width_decay: float
    threshold: float

    def paths(self, root: int) -> list[Path]:
        """All paths that the threshold lets live, best first."""
        found = self._below(Path((), 1.0), root, range(len(self.tables)))
        return sorted(found, key=lambda path: -path.score)

    def children(self, last: int, asked: Sequence[int]) -> list[tuple[int, float, list[int]]]:
        """(token, merged probability, the tables that name it), best first, ties by first named."""
        named: dict[int, list[int]] = {}
        wrong: dict[int, float] = {}
        for index in asked:
            for token, probability in self.tables[index].get(last, []):
                named.setdefault(token, []).append(index)
                wrong[token] = wrong.get(token, 1.0) * (1 - probability)
        merged = [(token, 1 - wrong[token], tables) for token, tables in named.items()]
        return sorted(merged, key=lambda child: -child[1])[: self.top_k]

    def _asked_below(self, asked: Sequence[int], named: Sequence[int]) -> list[int]:
        return [index for index in asked if index in named or self.follows[index]]

    def _below(self, path: Path, last: int, asked: Sequence[int]) -> list[Path]:
        depth = len(path.tokens) + 1
        if depth > self.max_depth:
            return []
        found = []
        for rank, (token, probability, tables) in enumerate(self.children(last, asked), start=1):
            score = path.score * probability * self.width_decay ** (rank - 1)
            if depth > 1:
                score *= self.depth_decay
                if score < self.threshold:
                    continue
            child = Path((*path.tokens, token), score)
            found += [child, *self._below(child, token, self._asked_below(asked, tables))]
        return found


# -- suffix matches ----------------------------------------------------------------------------


def suffix_matches(text: Sequence[int]) -> list[tuple[int, int]]:
    """(position, length) of each earlier place that the text's end repeats, freshest first."""
    found = []
    for position in range(len(text) - 1, 0, -1):
        length = 0
        while length < position and text[position - 1 - length] == text[-1 - length]:
            length += 1
        if length:
            found.append((position, length))
    return found


def continuations(text: Sequence[int]) -> list[tuple[int, int, int]]:
    """(token, longest match, places) behind the text's end: longest, most frequent, freshest."""
    matches = suffix_matches(text)
    tokens = list(dict.fromkeys(text[position] for position, _ in matches))
    rows = []
    for token in tokens:
        lengths = [length for position, length in matches if text[position] == token]
        rows.append((token, max(lengths), len(lengths)))
    return sorted(rows, key=lambda row: (-row[1], -row[2]))


# -- texts that were said ----------------------------------------------------------------------


class Said(NamedTuple):
    """A token that some text has, and all tokens before it, those of its prompt among them."""

    number: int  # How many tokens were said before, in all texts.
    text: int
    before: tuple[int, ...]
    token: int


def newest_said(said: Sequence[Said], end: Sequence[int], length: int) -> Said | None:
    """What was said last after the same `length` tokens as those at the end of a text."""
    last = tuple(end[-length:])
    matches = [each for each in said if len(end) >= length and each.before[-length:] == last]
    return matches[-1] if matches else None


# -- phrases of a corpus -----------------------------------------------------------------------


def next_in_corpus(
    documents: Sequence[Sequence[int]], prefix: Sequence[int], min_count: int
) -> list[int]:
    """What follows a prefix within a document often enough, most frequent first, then by id."""
    size = len(prefix)
    following = Counter(
        text[end]
        for text in documents
        for end in range(size, len(text))
        if list(text[end - size : end]) == list(prefix)
    )
    tokens = [token for token, count in following.items() if count >= min_count]
    return sorted(tokens, key=lambda token: (-following[token], token))


# -- costs -------------------------------------------------------------------------------------


def token_rates(
    scores: Sequence[Sequence[float]], seconds: Callable[[int], float], max_nodes: int
) -> list[float]:
    """Tokens a second at each width from 1 on, for rows that share the forward."""
    return [
        sum(1 + sum(row[: width - 1]) for row in scores) / seconds(width)
        for width in range(1, max_nodes + 1)
    ]


# -- decoding ----------------------------------------------------------------------------------


def greedy_loop(
    next_token: Callable[[tuple[int, ...]], int],
    prompt: Sequence[int],
    max_length: int,
    eos: int | None = None,
) -> list[int]:
    """The prompt and what plain greedy decoding writes behind it, one token a step."""
    text = list(prompt)
    while len(text) < max_length:
        text.append(next_token(tuple(text)))
        if text[-1] == eos:
            break
    return text


def padded(texts: Sequence[Sequence[int]], pad: int) -> list[list[int]]:
    """Rows of one length, as `generate()` returns them."""
    length = max(map(len, texts))
    return [[*text, *[pad] * (length - len(text))] for text in texts]

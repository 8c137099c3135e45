"""Measures how much of a text a cache knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from selfspec.cache import KEY_OF, Arrays, CacheContents
from selfspec.draft.sources.corpus import CorpusTables

_ALL = 1 << 30  # More than a prefix can have continuations.


@dataclass
class Coverage:
    """How often one table could help, over the positions of a text."""

    what: str  # the table, and how many tokens it looks at
    num_positions: int = 0  # with as many tokens before them as the table looks at
    num_found: int = 0  # of those: where the table has something recorded
    num_named: int = 0  # where the next token is among what is recorded

    def count(self, named: Iterable[int], token: int) -> None:
        """Counts one position, with the tokens that are recorded there and the one that came."""
        tokens = set(named)
        self.num_positions += 1
        self.num_found += bool(tokens)
        self.num_named += token in tokens


def coverage(contents: CacheContents, token_ids: Sequence[int]) -> list[Coverage]:
    """A line for each prefix length of the corpus, one for all of them, and one for each LUT."""
    lines = [] if contents.corpus is None else _of_corpus(contents.corpus, token_ids)
    for order, source in enumerate(KEY_OF, start=1):
        if source in contents.tables:
            lines.append(_of_rows(source, order, contents.tables[source], token_ids))
    return lines


def _of_corpus(tables: CorpusTables, token_ids: Sequence[int]) -> list[Coverage]:
    lines = [Coverage(f"corpus, {n} before") for n in range(1, tables.max_prefix + 1)]
    any_length = Coverage("corpus, any")
    indices: tuple[int, ...] = ()
    for position, token in enumerate(token_ids):
        found = [_named(tables, n, indices) for n in range(1, min(position, len(lines)) + 1)]
        for line, named in zip(lines, found, strict=False):
            line.count(named, token)
        if position:
            any_length.count((t for named in found for t in named), token)
        indices = tables.step(indices, token)
    return [*lines, any_length]


def _named(tables: CorpusTables, length: int, indices: Sequence[int]) -> list[int]:
    if length > len(indices) or indices[length - 1] < 0:
        return []
    _, following = tables.continuations(length, indices[length - 1], _ALL)
    return [token for token, _ in following]


def _of_rows(source: str, order: int, arrays: Arrays, token_ids: Sequence[int]) -> Coverage:
    keys = arrays[KEY_OF[source]].reshape(-1, order).tolist()
    rows = dict(zip(map(tuple, keys), arrays["ids"].tolist(), strict=True))
    line = Coverage(source)
    for end in range(order, len(token_ids)):
        line.count(rows.get(tuple(token_ids[end - order : end]), ()), token_ids[end])
    return line

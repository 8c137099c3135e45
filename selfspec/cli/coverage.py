"""How much of a text a cache knows: prefixes found, and next tokens named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from selfspec.draft.sources.corpus import CorpusTables
from selfspec.store import KEY_OF, Arrays, CacheContents

__all__ = ["Coverage", "coverage"]

_ALL = 1 << 30  # continuations of a prefix


@dataclass
class Coverage:
    """Over all places of a text that have so many tokens before them."""

    what: str
    num_places: int = 0
    num_found: int = 0  # something is recorded behind the last tokens
    num_named: int = 0  # and the next token is among it

    def count(self, named: Iterable[int], token: int) -> None:
        """One place, with what is recorded there, and what came."""
        tokens = set(named)
        self.num_places += 1
        self.num_found += bool(tokens)
        self.num_named += token in tokens


def coverage(contents: CacheContents, token_ids: Sequence[int]) -> list[Coverage]:
    """A line for each prefix length of the corpus, for all of them, and for each LUT."""
    lines = [] if contents.corpus is None else _of_corpus(contents.corpus, token_ids)
    for order, source in enumerate(KEY_OF, start=1):
        if source in contents.tables:
            look_up = _rows(KEY_OF[source], contents.tables[source])
            lines.append(_of_rows(source, order, look_up, token_ids))
    return lines


def _of_corpus(tables: CorpusTables, token_ids: Sequence[int]) -> list[Coverage]:
    lines = [Coverage(f"corpus, {n} before") for n in range(1, tables.max_prefix + 1)]
    any_length = Coverage("corpus, any")
    places: tuple[int, ...] = ()
    for position, token in enumerate(token_ids):
        found = [_named(tables, n, places) for n in range(1, min(position, len(lines)) + 1)]
        for line, named in zip(lines, found, strict=False):
            line.count(named, token)
        if position:
            any_length.count((t for named in found for t in named), token)
        places = tables.step(places, token)
    return [*lines, any_length]


def _named(tables: CorpusTables, length: int, places: Sequence[int]) -> list[int]:
    if length > len(places) or places[length - 1] < 0:
        return []
    _, following = tables.continuations(length, places[length - 1], _ALL)
    return [token for token, _ in following]


LookUp = Callable[[tuple[int, ...]], list[int]]


def _rows(key: str, arrays: Arrays) -> LookUp:
    keys = arrays[key].reshape(len(arrays[key]), -1).tolist()
    place_of = {tuple(each): place for place, each in enumerate(keys)}

    def look_up(tokens: tuple[int, ...]) -> list[int]:
        place = place_of.get(tokens)
        return [] if place is None else arrays["ids"][place].tolist()

    return look_up


def _of_rows(source: str, order: int, look_up: LookUp, token_ids: Sequence[int]) -> Coverage:
    line = Coverage(source)
    for end in range(order, len(token_ids)):
        line.count(look_up(tuple(token_ids[end - order : end])), token_ids[end])
    return line

"""What a grammar forces: the tokens that the library of a call's processors says must come.

Follows the text with a grammar of its own. What other sources name and the grammar forbids gets no
node. A wrong belief may cost a node, and never a token: each token is chosen with the processors of
the call, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.source import Cursor, RowStart, Source, shared_length
from selfspec.records import Candidate, Evidence, StepRecord

# At first, a forced token is as sure as a match of 24 tokens, and the last one of a forced text as
# sure as a match of 4: that one may be the beginning of a longer token.
_FORCED, _LAST = Evidence("grammar", 24), Evidence("grammar", 4)

Path = tuple[int, ...]  # The tokens after the committed text.


class Grammar(Protocol):
    """A grammar at one point of the text of one row."""

    def accept(self, token: int) -> bool:
        """Goes on by a token; False where that is not allowed, and then nothing has changed."""
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def mask(self) -> NDArray[np.uint32] | None:
        """One bit for each token that is allowed next, the lowest first; None: nothing is known."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that are sure to come next, as far as the library says."""
        ...


class GrammarSource(Source):
    """The grammar that the processors of one row follow; they may hold none before they are used.

    `find` says those of all rows when the cursor is opened, after the first token was chosen.
    """

    name = "grammar"

    def __init__(self, find: Callable[[], Sequence[Grammar | None]], number: int) -> None:
        self._find = find
        self._number = number  # of the row

    def open(self, row: RowStart) -> GrammarCursor | None:
        grammar = self._find()[self._number]
        return None if grammar is None else GrammarCursor(grammar)


class GrammarCursor(Cursor):
    """The grammar of one row, at the end of its text or after its drafts; a state is a path."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._path: Path = ()  # What the grammar has taken after the committed text.
        self._is_lost = False  # Has a token come that the grammar does not know?
        self._mask: NDArray[np.uint32] | None = None  # Where the grammar was asked last.

    def root(self) -> Path:
        return ()

    def follow(self, state: Path, token: int) -> Path:
        return (*state, token)

    def expand(self, state: Path) -> list[Candidate]:
        """The token that must come, if there is only one; costs a mask."""
        self._mask = self._grammar.mask() if self._go(state) else None
        if self._mask is None:
            return []
        if (token := _only(self._mask)) is not None:
            return [(token, _FORCED)]
        forced = self._grammar.forced()
        return [(forced[0], _FORCED if len(forced) > 1 else _LAST)] if forced else []

    def possible(self, state: Path, tokens: Iterable[int]) -> list[int]:
        mask = self._mask
        return [token for token in tokens if mask is None or _has(mask, token)]

    def observe(self, record: StepRecord) -> None:
        self._is_lost = not (self._go(()) and all(map(self._grammar.accept, record.committed_ids)))

    def _go(self, path: Path) -> bool:
        """Moves the grammar to the end of a path; False where it can't."""
        if self._is_lost:
            return False
        same = shared_length(path, self._path)
        if same < len(self._path):
            self._grammar.rollback(len(self._path) - same)
            self._path = path[:same]
        for token in path[same:]:
            if not self._grammar.accept(token):
                return False
            self._path = (*self._path, token)
        return True


def _has(mask: NDArray[np.uint32], token: int) -> bool:
    index = token >> 5
    return index < len(mask) and bool(int(mask[index]) >> (token & 31) & 1)


def _only(mask: NDArray[np.uint32]) -> int | None:
    """The only token of a mask; None if there are others."""
    parts = np.flatnonzero(mask)
    if len(parts) != 1:
        return None
    bits = int(mask[parts[0]])
    return int(parts[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None

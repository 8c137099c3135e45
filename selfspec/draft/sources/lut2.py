"""The second-order LUT: what followed the last two tokens, in a hashed table of fixed size.

Asked in addition to the first-order row. Keys are stored, so that a pair never reads the row of
another one: of two pairs that share a slot the newer one has it, and the other is not found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.rows import Rows
from selfspec.records import Candidate, StepRecord, TopK

__all__ = ["Lut2Cursor", "Lut2Source"]

_SLOT_BITS = 17
# An odd number without pattern, so that neighbouring keys get slots far apart.
_SPREAD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1

# The last token but one, and the last token.
Pair = tuple[int, int]


class Lut2Source:
    """Slots for 131,072 pairs, shared by all rows and calls of a `SelfSpec`: 7.3 MB for K = 8."""

    name = "lut2"

    def __init__(self, vocab_size: int, top_k: int, *, slot_bits: int = _SLOT_BITS) -> None:
        self._vocab_size = vocab_size
        self._shift = 64 - slot_bits
        self._hold_keys(np.full(1 << slot_bits, -1, np.int64))
        self._rows = Rows(self.name, 1 << slot_bits, top_k)

    @property
    def nbytes(self) -> int:
        """The bytes of keys and rows."""
        return self._keys.nbytes + self._rows.nbytes

    def open(self, prompt_ids: Sequence[int], *, learns: bool) -> Lut2Cursor:
        """A cursor behind the last two tokens of the prompt."""
        pair = (prompt_ids[-2], prompt_ids[-1]) if len(prompt_ids) > 1 else None
        return Lut2Cursor(self, pair, learns=learns)

    def copy(self) -> Lut2Source:
        """A copy for one request; costs one pass over the table."""
        twin = Lut2Source(self._vocab_size, 0, slot_bits=0)
        twin._shift = self._shift
        with self._rows.lock:
            twin._hold_keys(self._keys.copy())
            twin._rows = self._rows.copy()
        return twin

    def observe_pairs(self, pairs: NDArray[np.int64], top: TopK) -> None:
        """Learns what follows each pair of tokens; of repeated pairs the last one wins."""
        known = ((pairs >= 0) & (pairs < self._vocab_size)).all(-1)  # Others have no key.
        if not known.all():
            pairs, top = pairs[known], top.at(known)
        keys = pairs[:, 0] * self._vocab_size + pairs[:, 1]
        slots = (keys.view(np.uint64) * np.uint64(_SPREAD) >> np.uint64(self._shift)).view(np.int64)
        with self._rows.lock:
            self._keys[slots] = keys
            self._rows.write(slots, top)

    def next_tokens(self, pair: Pair) -> list[Candidate]:
        """The candidates behind two tokens; none where another pair has the slot."""
        if pair[1] >= self._vocab_size:
            return []
        key = pair[0] * self._vocab_size + pair[1]
        slot = (key * _SPREAD & _WORD) >> self._shift
        with self._rows.lock:
            return self._rows.read(slot) if self._flat_keys[slot] == key else []

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The slots that are taken, by pair: what a cache keeps."""
        with self._rows.lock:
            slots = np.flatnonzero(self._keys >= 0)
            slots = slots[np.argsort(self._keys[slots])]
            pairs = np.stack(np.divmod(self._keys[slots], self._vocab_size), axis=-1)
            top = self._rows.part(slots)
        return {"pairs": pairs.astype(np.int32), **top._asdict()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Puts back what `arrays` gave, recorded with whatever K."""
        top = self._rows.fitted(TopK(arrays["ids"], arrays["probabilities"]))
        self.observe_pairs(arrays["pairs"].astype(np.int64), top)

    def _hold_keys(self, keys: NDArray[np.int64]) -> None:
        self._keys = keys
        self._flat_keys = keys.data  # A view that Python reads faster than an array.


class Lut2Cursor:
    """What the table knows behind the end of one row's text, which is its last two tokens."""

    def __init__(self, source: Lut2Source, pair: Pair | None, *, learns: bool) -> None:
        self._source = source
        self._pair = pair
        self._learns = learns

    def root(self) -> Pair | None:
        """The last two committed tokens; None where the text is shorter."""
        return self._pair

    def expand(self, state: Pair | None) -> list[Candidate]:
        """The top-K behind two tokens."""
        return [] if state is None else self._source.next_tokens(state)

    def follow(self, state: Pair | None, token: int) -> Pair | None:
        """Any two tokens may have a slot."""
        return None if state is None else (state[1], token)

    def observe(self, record: StepRecord) -> None:
        """Learns from all nodes."""
        if self._learns and (lesson := record.lesson):
            pairs = lesson.pairs
            if self._pair is not None:  # The cursor knows what is above the root.
                pairs = pairs.copy()
                pairs[len(pairs) - len(record.path), 0] = self._pair[0]
            self._source.observe_pairs(pairs, lesson.top)
        end = (record.tree.tokens[0], *record.committed_ids)[-2:]
        self._pair = (end[0], end[1]) if len(end) == 2 else self._pair

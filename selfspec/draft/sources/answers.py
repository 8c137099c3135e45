"""Answers that rows have written: where the last tokens were written before, it may go on alike.

One memory of a `SelfSpec`, into which all rows write while they are decoded, so that samples of one
prompt copy from each other. It holds answers and no prompts. A token is found by the 4 or 12
tokens in front of it, which may be the prompt's; of equal ones the newest is known. A place that
was found is followed with changes allowed, as in an edit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.following import Following, FollowingCursor, Match
from selfspec.draft.sources.source import RowStart, Source
from selfspec.records import Candidate, StepRecord

MAX_TOKENS = 1 << 18
# A token is found by these numbers of tokens before it. LUTs and the text itself know shorter ones.
_LENGTHS = (4, 12)
_LONGEST = _LENGTHS[-1]
# The key of some tokens t₁ … tₙ is Σ (tᵢ + 1) · Fⁿ⁺¹⁻ⁱ modulo 2⁶⁴, whose upper bits are a slot.
_FACTOR, _WORD_BITS = 0x9E3779B97F4A7C15, 64
_WORD = (1 << _WORD_BITS) - 1
_POWERS = [pow(_FACTOR, power, 1 << _WORD_BITS) for power in range(_LONGEST + 1)]
_LENGTHS_AND_POWERS = tuple((length, _POWERS[length]) for length in _LENGTHS)


class AnswersSource(Source):
    """A ring of tokens, each with the place of the one after it, and an index of their places.

    A place is how many tokens were written before. Once the ring is full, new tokens replace the
    oldest ones. The index has four slots for each token. A key that needs the slot of another one
    takes it, so that of a full ring four keys in five are found. It is safe for several threads:
    what one reads while another writes can be a wrong draft, and no more.

    It takes 19 MB for 262,144 tokens.
    """

    name = "answers"

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        num_bits = (4 * max_tokens - 1).bit_length()
        self._shift = _WORD_BITS - num_bits
        self._lock = threading.Lock()
        self._num_written = 0
        self._hold(  # Zeros take no memory before they are written.
            np.zeros(max_tokens, np.int32),
            np.zeros(max_tokens, np.int64),
            np.zeros(1 << num_bits, np.uint64),
            np.zeros(1 << num_bits, np.int64),
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def open(self, row: RowStart) -> AnswersCursor:
        return AnswersCursor(self, row.prompt_ids, learns=row.learns)

    def copy(self) -> AnswersSource:
        """A copy for one request; if there is anything to copy, costs one pass over the memory."""
        if not self._num_written:
            return AnswersSource(self._max_tokens)
        twin = copy.copy(self)
        twin._lock = threading.Lock()
        with self._lock:
            twin._num_written = self._num_written
            twin._hold(*(array.copy() for array in self._arrays))
        return twin

    def token(self, place: int) -> int:
        """The token at a place; -1 where there is none yet, or no more."""
        newest = self._num_written
        if not max(newest - self._max_tokens, 0) <= place < newest:
            return -1
        return self._tokens[place % self._max_tokens]

    def after(self, place: int) -> int:
        """The place of the token after the one at a place, -1 if there is none yet."""
        return -1 if place < 0 else self._next_places[place % self._max_tokens]

    def next_tokens(self, matches: Iterable[Match]) -> list[tuple[int, int]]:
        tokens = [(self.token(place), run) for place, run in matches]
        return [(token, run) for token, run in tokens if token >= 0]

    def longer(self, matches: Iterable[Match], token: int) -> list[Match]:
        return [(self.after(p), run + 1) for p, run in matches if self.token(p) == token]

    def near(self, token: int, left: int) -> Iterable[int]:
        """None: a place is found by several tokens in front of it."""
        return ()

    def find(self, key: int) -> int:
        """The place of the newest token that has such tokens in front of it, or -1."""
        slot = key >> self._shift
        return self._places[slot] if self._keys[slot] == key else -1

    def append(self, last: int, token_ids: Sequence[int], keys: Sequence[Iterable[int]]) -> int:
        """Writes the next tokens of a text whose last one is at a place; returns that of the last.

        `keys` are those of the tokens in front of each. Costs 2 µs a token.
        """
        max_tokens, shift = self._max_tokens, self._shift
        tokens, next_places = self._tokens, self._next_places
        index, places = self._keys, self._places
        with self._lock:
            place = self._num_written
            for token, before in zip(token_ids, keys, strict=True):
                if last > place - max_tokens:
                    next_places[last % max_tokens] = place
                at = place % max_tokens
                tokens[at], next_places[at] = token, -1
                for key in before:
                    slot = key >> shift
                    index[slot], places[slot] = key, place
                last = place
                place += 1
            self._num_written = place
        return last

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The texts, that which was written to last at the end, each with -1 after it.

        Rows may write meanwhile, but for the time of a copy.
        """
        with self._lock:
            newest, (ring, after) = self._num_written, (array.copy() for array in self._arrays[:2])
        oldest = max(newest - self._max_tokens, 0)
        slots = np.arange(oldest, newest) % self._max_tokens
        tokens, nexts = ring[slots], np.maximum(after[slots] - oldest, -1)
        is_first = tokens >= 0
        is_first[nexts[nexts >= 0]] = False
        next_of, texts = nexts.tolist(), []
        for place in np.flatnonzero(is_first).tolist():
            texts.append([place])
            while (place := next_of[place]) >= 0:
                texts[-1].append(place)
        texts.sort(key=itemgetter(-1))
        parts = [np.append(tokens[text], np.int32(-1)) for text in texts]
        return {"tokens": np.concatenate(parts)} if parts else {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Writes the newest of the texts that `arrays` gave, a mark after each of them."""
        tokens = arrays["tokens"][-self._max_tokens :].astype(np.int64)
        keys, are_keys = _keys_before(tokens)
        are_keys &= tokens[:, None] >= 0
        with self._lock:
            places = self._num_written + np.arange(len(tokens))
            ring, after, index, places_by_slot = self._arrays
            ring[places % self._max_tokens] = tokens
            goes_on = np.minimum(tokens, np.append(tokens, -1)[1:]) >= 0
            after[places % self._max_tokens] = np.where(goes_on, places + 1, -1)
            slots = (keys[are_keys] >> np.uint64(self._shift)).view(np.int64)
            index[slots] = keys[are_keys]
            places_by_slot[slots] = np.broadcast_to(places[:, None], keys.shape)[are_keys]
            self._num_written += len(tokens)

    def _hold(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        # Views that Python reads faster than arrays.
        self._tokens, self._next_places, self._keys, self._places = (a.data for a in arrays)


class AnswersCursor(FollowingCursor):
    """The place in other texts where one row's text is, and what it writes itself."""

    def __init__(self, source: AnswersSource, prompt_ids: Sequence[int], *, learns: bool) -> None:
        super().__init__("answers", source, Following())
        self._source = source
        self._learns = learns
        self._last = -1  # The place of the last token that it wrote.
        self._sums = [0]  # The keys of all tokens up to each of the last ones.
        for token in prompt_ids[-_LONGEST:]:
            self._move(token)
        self._keys = self._keys_at_end()

    def expand(self, state: Following) -> list[Candidate]:
        return [] if state.is_nowhere else super().expand(state)

    def follow(self, state: Following, token: int) -> Following:
        return state if state.is_nowhere else super().follow(state, token)

    def observe(self, record: StepRecord) -> None:
        """Moves on, and looks the end of the text up if few tokens agree so far."""
        if record.is_padding:
            return
        before = []
        for token in record.committed_ids:
            self._end = self.follow(self._end, token)
            before.append(self._keys)
            self._move(token)
            self._keys = self._keys_at_end()
        self._find()
        if self._learns:
            self._last = self._source.append(self._last, record.committed_ids, before)

    def _find(self) -> None:
        """Goes where more tokens in front agree, if the index knows of such a place."""
        run = next((run for place, run in self._end.matches if self._source.token(place) >= 0), 0)
        lengths = _LENGTHS[: len(self._keys)]
        for length, key in zip(reversed(lengths), reversed(self._keys), strict=True):
            if length < run:
                return
            if self._source.token(place := self._source.find(key)) >= 0:
                self._end = Following(((place, length),), place, place)
                return

    def _move(self, token: int) -> None:
        self._sums.append((self._sums[-1] + token + 1) * _FACTOR & _WORD)
        del self._sums[: -_LONGEST - 1]

    def _keys_at_end(self) -> list[int]:
        """The keys of the last 4 and 12 tokens, or fewer of them for a shorter text."""
        sums = self._sums
        end, num = sums[-1], len(sums)
        return [end - sums[-1 - n] * power & _WORD for n, power in _LENGTHS_AND_POWERS if n < num]


def _keys_before(tokens: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """(N, lengths): the key of the tokens before each token, and whether all are of one text."""
    padded = np.concatenate([np.full(_LONGEST, -1, np.int64), tokens])
    before = np.lib.stride_tricks.sliding_window_view(padded, _LONGEST)[:-1, ::-1]
    sums = np.cumsum((before + 1).astype(np.uint64) * np.array(_POWERS[1:], np.uint64), axis=1)
    are_tokens = np.logical_and.accumulate(before >= 0, axis=1)
    ends = np.array(_LENGTHS) - 1
    return sums[:, ends], are_tokens[:, ends]

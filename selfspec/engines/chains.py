"""Chains of drafts for all rows at once: which token came after the last few, by hashed n-grams.

Everything that is known is one table: the text of the row itself, and that of all rows, caches and
memory files have. A look-up of all rows is a few operations of numpy, so a step of 64 rows takes
about as long as ten rows would in a loop over them. Knows tokens and hashes; no text is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.calibration import PRIOR_WEIGHT, match_prior
from selfspec.draft.sources.corpus import CorpusTables

__all__ = ["LONGEST", "NUM_LENGTHS", "Chains", "windows"]

# A token is kept by each of these numbers of tokens before it. The longest match is drafted from.
_LENGTHS = np.array([1, 2, 3, 4, 6, 10, 16])
NUM_LENGTHS, LONGEST = len(_LENGTHS), int(_LENGTHS[-1])
# An entry is its key's lower half, then a token, then how often that came.
_TOKEN_BITS, _COUNT_BITS = 24, 8
_HALF, _COUNT_SHIFT = np.uint64(32), np.uint64(_COUNT_BITS)
_MAX_COUNT = np.uint64((1 << _COUNT_BITS) - 1)
_TOKEN_MASK = np.uint64((1 << _TOKEN_BITS) - 1)
_LEAST_BITS = 22  # Four million entries, 32 MB; a token of an answer takes up to 14 of them.
# A text is read in parts, since of the same n-grams in one part only the last one counts.
_PART, _TABLE_PART = 256, 1 << 16
# Random factors of the hashes. The first one is odd, and spreads keys over the table.
_FACTORS = np.random.default_rng(1).integers(1 << 62, 1 << 63, 2 + LONGEST).astype(np.uint64)
_SPREAD, _SALT, _WEIGHTS = _FACTORS[0] | np.uint64(1), _FACTORS[1], _FACTORS[2:]

# A kind is how long the match was and how often its token came: once, up to three times, or more.
_MOST_OFTEN = (1, 3)
_NUM_KINDS = 1 + NUM_LENGTHS * (len(_MOST_OFTEN) + 1)
_MANY_TRIALS = 1000.0  # Above this, trials and hits are halved.

Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]


def windows(token_ids: NDArray[Any], rows: Ids, ends: Ids, length: int) -> Ids:
    """The last tokens in front of each end, the last one first; (N, length), -1 for none.

    >>> windows(np.array([[5, 6, 7]]), np.array([0]), np.array([2]), 3)
    array([[ 6,  5, -1]])
    """
    places = ends[:, None] - np.arange(1, length + 1)
    found: Ids = token_ids[rows[:, None], np.maximum(places, 0)].astype(np.int64)
    found[places < 0] = -1
    return found


class GramTable:
    """The token that came after each n-gram, by the n-gram's key, and how often it did.

    A token that came several times gives way only after others have come about as often. The size
    is fixed: a newer key takes an older one's entry.
    """

    def __init__(self, num_known: int) -> None:
        num_bits = max(_LEAST_BITS, num_known.bit_length() + 1)
        self._entries = np.full(1 << num_bits, 0, np.uint64)  # Unlike zeros, this is memory now.
        self._shift = np.uint64(64 - num_bits)

    def find(self, keys: Keys) -> Keys:
        found = self._entries[(keys >> self._shift).view(np.int64)]
        return np.where(_same_key(found, keys), found, 0)

    def add(self, keys: Keys, tokens: Keys, counts: Any = 1) -> None:
        """Counts tokens after keys; of a key that is named twice the last one counts."""
        slots = (keys >> self._shift).view(np.int64)
        old = self._entries[slots]
        num_old = np.where(_same_key(old, keys), old & _MAX_COUNT, 0)
        is_same = (num_old > 0) & (old >> _COUNT_SHIFT & _TOKEN_MASK == tokens)
        num_new = np.minimum(np.where(is_same, num_old, 0) + np.uint64(counts), _MAX_COUNT)
        new = keys << _HALF | tokens << _COUNT_SHIFT | num_new
        stays = ~is_same & (num_old > counts)
        self._entries[slots] = np.where(stays, old ^ num_old ^ num_old >> np.uint64(1), new)


class Chains:
    """Drafts for many rows, and learns from what they say.

    There is room for `num_known` n-grams from elsewhere. Tokens beyond the vocabulary, which a
    prompt may hold, are never drafted.
    """

    def __init__(
        self, max_tokens: int, least_chance: float, vocab_size: int, num_known: int = 0
    ) -> None:
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._least_chance = least_chance
        self._grams = GramTable(num_known)
        # How often a token came true: [agree, own only, all only] × pairs of kinds.
        priors = _priors()
        self._trials = np.full_like(priors, PRIOR_WEIGHT)
        self._hits = priors * PRIOR_WEIGHT
        # What was looked at in the last step, by depth: tokens (R, 2) and pairs of kinds (R,).
        self._looked: list[tuple[Ids, Ids]] = []

    def read(self, text: NDArray[np.int64], serial: int = 0) -> None:
        """Learns a text, which is a row's own, or everyone's if it has no serial."""
        for start in range(1, len(text), _PART):
            ends = np.arange(start, min(start + _PART, len(text)))
            ends = ends[text[ends] < self._vocab_size]
            before = windows(text[None], np.zeros_like(ends), ends, LONGEST)
            salt = np.full((len(ends), 1), serial, np.uint64)
            self._grams.add(_keys(before, salt)[:, 0], _tokens(text[ends])[:, 0])

    def observe(self, before: Ids, tokens: Ids, serials: Ids) -> None:
        """Learns the token after each window, for the row itself and for all."""
        self._grams.add(_keys(before, _salts(serials)), _tokens(tokens))

    def count(self, places: Ids, depths: Ids, tokens: Ids) -> None:
        """Counts which of the last step's candidates came true.

        Each token has its row's place in that step, or -1, and its depth below the root.
        """
        known = np.flatnonzero((places >= 0) & (depths < len(self._looked)))
        if not len(known):
            return
        places, depths, tokens = places[known], depths[known], tokens[known]
        looked = [np.stack(each) for each in zip(*self._looked, strict=True)]
        named, pairs = (each[depths, places] for each in looked)
        own, all_ = named.T
        agree = own == all_
        is_named = np.stack([agree, ~agree, ~agree]) & (np.stack([own, own, all_]) >= 0)
        is_right = np.stack([own, own, all_]) == tokens
        flat = np.arange(3)[:, None] * _NUM_KINDS**2 + pairs
        size = self._trials.size
        self._trials += np.bincount(flat[is_named], minlength=size).reshape(3, -1)
        self._hits += np.bincount(flat[is_named & is_right], minlength=size).reshape(3, -1)
        if self._trials.max() > _MANY_TRIALS:
            many = self._trials > _MANY_TRIALS
            self._trials[many] /= 2
            self._hits[many] /= 2

    def draft(self, before: Ids, serials: Ids, limits: Ids) -> list[list[int]]:
        """The likeliest chain of each row, of at most `limits` tokens."""
        salts = _salts(serials)
        chances = self._hits / self._trials
        num_rows, depth = len(before), min(self._max_tokens, int(limits.max(initial=0)))
        text = np.empty((num_rows, depth + LONGEST), np.int64)
        text[:, depth:] = before
        scores, lengths = np.ones(num_rows), np.zeros(num_rows, np.int64)
        self._looked = []
        for left in range(depth, 0, -1):
            named, pairs = self._look(text[:, left : left + LONGEST], salts)
            self._looked.append((named, pairs))
            text[:, left - 1], chance = _likeliest(named, pairs, chances)
            scores *= chance
            goes_on = (scores >= self._least_chance) & (scores > 0) & (lengths == depth - left)
            goes_on &= lengths < limits
            if not goes_on.any():
                break
            lengths += goes_on
        chains = text[:, :depth][:, ::-1].tolist()
        return [chain[:length] for chain, length in zip(chains, lengths.tolist(), strict=True)]

    def _look(self, before: Ids, salts: Keys) -> tuple[Ids, Ids]:
        """What own and all texts name after each window (R, 2), or -1; and pairs of kinds (R,)."""
        entries = self._grams.find(_keys(before, salts))
        longest = ((entries > 0) * np.arange(1, 1 + NUM_LENGTHS)).max(-1)
        found = entries[np.arange(len(entries))[:, None], [0, 1], longest - 1].view(np.int64)
        tokens = np.where(longest > 0, found >> _COUNT_BITS & int(_TOKEN_MASK), -1)
        kinds = _KINDS[longest, found & int(_MAX_COUNT)]
        return tokens, kinds[:, 0] * _NUM_KINDS + kinds[:, 1]

    def read_table(self, keys: Ids, ids: Ids, chances: NDArray[Any]) -> None:
        """Learns the likeliest token after each phrase (N, n)."""
        num_tokens = keys.shape[1]
        if num_tokens not in _LENGTHS:
            return
        for start in range(0, len(keys), _TABLE_PART):
            part = slice(start, start + _TABLE_PART)
            before = np.full((len(ids[part]), LONGEST), -1, np.int64)
            before[:, :num_tokens] = keys[part, ::-1]
            is_some = ids[part] >= 0
            hashes = _hashes(before[is_some])[:, num_tokens == _LENGTHS] * _SPREAD
            counts = (1 + 8 * np.nan_to_num(chances[part][is_some]).clip(0, 1)).astype(np.uint64)
            self._grams.add(hashes, _tokens(ids[part][is_some])[:, 0], counts[:, None])

    def read_corpus(self, tables: CorpusTables) -> None:
        """Learns the likeliest token after each phrase of a corpus."""
        arrays = tables.arrays()
        phrases = np.zeros((1, 0), np.int64)
        offsets = np.array([0, len(arrays["token.1"])])
        for length in range(1, tables.max_prefix + 1):
            last = arrays[f"token.{length}"].astype(np.int64)
            above = np.searchsorted(offsets, np.arange(len(last)), "right") - 1
            phrases = np.column_stack([phrases[above.clip(0, len(phrases) - 1)], last])
            starts, ends = arrays[f"next.{length}"][:-1], arrays[f"next.{length}"][1:]
            told = np.flatnonzero(starts < ends.clip(max=len(arrays[f"next_token.{length}"])))
            ids = arrays[f"next_token.{length}"][starts[told]].astype(np.int64)
            counts = arrays[f"next_count.{length}"][starts[told]]
            chances = counts / np.maximum(arrays[f"total.{length}"][told], 1)
            self.read_table(phrases[told], ids, chances)
            offsets = arrays.get(f"child.{length}", offsets)


def _same_key(entries: Keys, keys: Keys) -> Any:
    return entries >> _HALF == keys & np.uint64(0xFFFFFFFF)


def _hashes(before: Ids) -> Keys:
    """The hash of the last tokens, for each length; (N, lengths)."""
    hashes: Keys = np.cumsum((before + 1).view(np.uint64) * _WEIGHTS, axis=1)[:, _LENGTHS - 1]
    return hashes


def _salts(serials: Ids) -> Keys:
    """(N, 2): the row's own, and that of all."""
    return np.stack([serials, np.zeros_like(serials)], axis=1).view(np.uint64)


def _keys(before: Ids, salts: Keys) -> Keys:
    """(N, salts, lengths)"""
    keys: Keys = (_hashes(before)[:, None] + (salts * _SALT)[:, :, None]) * _SPREAD
    return keys


def _tokens(tokens: Ids) -> Keys:
    return tokens.astype(np.uint64)[:, None, None]


def _likeliest(named: Ids, pairs: Ids, chances: NDArray[np.float64]) -> tuple[Ids, Any]:
    """The token that is likelier of the two, and its chance; 0 where nobody names any."""
    both, own, all_ = chances[:, pairs]
    is_all = (all_ > own) & (named[:, 0] != named[:, 1])
    chance = np.where(named[:, 0] == named[:, 1], both, np.maximum(own, all_))
    return np.where(is_all, named[:, 1], named[:, 0]), chance


def _priors() -> NDArray[np.float64]:
    """The chance of each pair of kinds before anything was counted, by who names the token."""
    lengths = np.repeat(_LENGTHS, len(_MOST_OFTEN) + 1)
    often = np.tile(np.arange(len(_MOST_OFTEN) + 1), NUM_LENGTHS)
    alone = np.concatenate([[0.0], match_prior(lengths + often)])
    both = 1 - np.outer(1 - alone, 1 - alone)
    both[0], both[:, 0] = 0, 0
    own, all_ = np.broadcast_arrays(alone[:, None], alone[None])
    return np.stack([both, own, all_]).reshape(3, -1)


def _kinds() -> Ids:
    """The kind of a match, by its place among the lengths, from 1 on, and by its count."""
    often = np.searchsorted(_MOST_OFTEN, np.arange(int(_MAX_COUNT) + 1))
    kinds = 1 + np.arange(-1, NUM_LENGTHS)[:, None] * (len(_MOST_OFTEN) + 1) + often
    kinds[0] = 0
    return kinds


_KINDS = _kinds()

"""`PrefixStore`: the keys and values of texts that were read, so that no prompt reads them again.

A prompt goes on from the longest beginning that it shares with a text that is kept, or with one
that is still being written. Texts are compared token by token; no hash is trusted. Knows token ids
and columns; not how a model is run, nor who asked for a text.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.compat.states import has_states
from selfspec.forward.columns import Columns, Prefix, TextKV, first_needed
from selfspec.forward.slots import Member

Ids = NDArray[np.int64]
LEAST = 16  # Tokens. A shorter beginning is read about as fast as it is found and copied.
# Attention over the rest of a prompt needs a mask, and with one torch computes twice as much as for
# a whole prompt. So a beginning that is less than a quarter of a prompt saves no time.
_LEAST_SHARE = 4
_MOST_PARENTS = 32  # A text of more turns is copied whole.


class PromptLogits(NamedTuple):
    """What was known once a prompt was read: how long it is, and the logits after its last token.

    Only prompts of the same `scope` share what was read.
    """

    num_tokens: int
    logits: torch.Tensor | None  # (1, V); None where the prompt was not read to its end.
    scope: Hashable = None


@dataclass(eq=False)
class KeptText:
    """One text with its keys and values; its first `start` columns are those of its parent.

    Running states serve only a prompt that goes on from their place.
    """

    ids: Ids
    end: PromptLogits
    kv: TextKV
    parent: KeptText | None = None
    start: int = 0

    @cached_property
    def num_bytes(self) -> int:
        tensors = (*self.kv.columns.values(), *self.kv.states.values(), self.end.logits)
        return self.ids.nbytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def answers(self, num_tokens: int) -> bool:
        """Are the logits after so many tokens known?"""
        return self.end.logits is not None and self.end.num_tokens == num_tokens

    @property
    def line(self) -> list[KeptText]:
        """This text, its parent, the parent of that and so on."""
        line = [self]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        return line

    def num_shared(self, ids: Ids) -> int:
        """How many tokens at its beginning are those of `ids`."""
        length = min(len(ids), len(self.ids))
        differs = self.ids[:length] != ids[:length]
        return int(differs.argmax()) if differs.any() else length

    def pieces(self, member: Member, start: int, end: int) -> list[torch.Tensor] | None:
        """A member's columns from `start` to `end`, in their order; None if one was dropped."""
        columns = self.kv.columns[member]
        first = len(self.ids) - columns.shape[2]
        mine = [columns[:, :, max(start - first, 0) : end - first]] if end > first else []
        if start >= min(first, end):
            return mine
        if self.parent is None or min(first, end) > self.start:
            return None
        before = self.parent.pieces(member, start, min(first, end))
        return None if before is None else [*before, *mine]

    def beginning(self, ids: Ids, shared: int, cache: Any) -> Prefix | None:
        """What a prompt needs that shares so many tokens; None if one of its columns was dropped.

        At least one token is left to read, unless the logits after the whole prompt are known.
        """
        is_whole = shared == len(ids) and self.answers(shared)
        num_columns = min(shared, len(ids) - (not is_whole))
        wants_states = any(map(has_states, cache.layers))
        if wants_states and not (self.kv.states and num_columns == len(self.ids)):
            return None
        columns: Columns = {}
        for member in self.kv.columns:
            first = first_needed(cache.layers[member[0]], num_columns)
            pieces = self.pieces(member, first, num_columns)
            if pieces is None:
                return None
            columns[member] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        kv = TextKV(columns, self.kv.states)
        return Prefix(num_columns, kv, self.end.logits if is_whole else None)


class PrefixStore:
    """Texts that have ended, the least lately used first, up to a limit in bytes.

    It is for one state of one model; any thread may ask. Whoever uses a text uses its parents too,
    so a text is dropped before them.
    """

    def __init__(self, most: int | None = 0) -> None:
        self._most = most  # None: whatever `limit_to` says.
        self._limit = most or 0
        self._texts: dict[KeptText, None] = {}
        self._lock = threading.RLock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts, added up anew each time, so that no interrupt leaves a wrong sum."""
        return sum(text.num_bytes for text in list(self._texts))

    def limit_to(self, num_bytes: int) -> None:
        """Keeps at most this many bytes from now on, and drops at once what is above."""
        with self._lock:
            most = num_bytes if self._most is None else min(num_bytes, self._most)
            self._limit = max(most, 0)
            self._drop_to(self._limit)

    def drop(self) -> int:
        """Drops all texts, where memory has run out; returns how many bytes they took."""
        with self._lock:
            num_bytes = self.num_bytes
            self._drop_to(0)
            return num_bytes

    def close(self) -> None:
        """Drops all texts, and keeps none any more."""
        with self._lock:
            self._most = 0
            self.limit_to(0)

    def beginning(
        self, ids: Ids, scope: Hashable, cache: Any, running: Iterable[KeptText] = ()
    ) -> Prefix | None:
        """The longest beginning of a prompt that was read already, for its empty cache.

        None where none is long enough to save time.
        """
        least = max(LEAST, len(ids) // _LEAST_SHARE)
        with self._lock:
            for shared, text in _alike(ids, scope, (*running, *self._texts)):
                beginning = text.beginning(ids, shared, cache) if shared >= least else None
                if beginning is not None and beginning.num_columns >= least:
                    if text in self._texts:
                        self._use(text)
                    return beginning
        return None

    def keep(self, ids: Ids, end: PromptLogits, kv: TextKV) -> None:
        """Copies the columns of a text, up to the last of its ids, if they fit.

        What an earlier text has is not copied.
        """
        with self._lock:
            alike = _alike(ids, end.scope, self._texts)
            start, parent = next(iter(alike), (0, None))
            if parent is not None and len(parent.line) > _MOST_PARENTS:
                start, parent = 0, None
            if parent is not None:
                self._use(parent)
            new = TextKV(_without_known(kv.columns, len(ids), parent, start), kv.states)
            is_known = not new.states or (parent is not None and len(parent.ids) == len(ids))
            if is_known and not any(columns.shape[2] for columns in new.columns.values()):
                return
            text = KeptText(ids, end, new, parent, start)
            if sum(relative.num_bytes for relative in text.line) > self._limit:
                return
            self._drop_to(self._limit - text.num_bytes)
            try:
                logits = None if end.logits is None else end.logits.clone()
                text = KeptText(ids, end._replace(logits=logits), _copy(new), parent, start)
            except RuntimeError:  # There is no memory, which running texts need more.
                self.drop()
                return
            self._use(text)

    def _use(self, text: KeptText) -> None:
        used = dict.fromkeys(text.line)  # Parents come after children, and so are dropped later.
        others = (text for text in self._texts if text not in used)
        self._texts = dict.fromkeys((*others, *used))  # At once, or not at all.

    def _drop_to(self, num_bytes: int) -> None:
        left = self.num_bytes
        while self._texts and left > num_bytes:
            text = next(iter(self._texts))
            del self._texts[text]
            left -= text.num_bytes


def _alike(ids: Ids, scope: Hashable, texts: Iterable[KeptText]) -> list[tuple[int, KeptText]]:
    """The texts that begin like others, each with the number of tokens; the longest come first.

    Of those that share all, one comes first that knows the logits after them.
    """
    pairs = [(text.num_shared(ids), text) for text in texts if text.end.scope == scope]
    alike = [(shared, text) for shared, text in pairs if shared >= LEAST]
    return sorted(alike, key=lambda pair: (pair[0], pair[1].answers(len(ids))), reverse=True)


def _without_known(columns: Columns, length: int, parent: KeptText | None, start: int) -> Columns:
    """Each member's columns without those before `start`, if the parent has all of these."""
    new: Columns = {}
    for member, tensor in columns.items():
        first = length - tensor.shape[2]
        known = None if parent is None or first >= start else parent.pieces(member, first, start)
        new[member] = tensor if known is None else tensor[:, :, start - first :]
    return new


def _copy(kv: TextKV) -> TextKV:
    with torch.inference_mode(False):  # Calls outside of it may read on after them.
        columns = {member: tensor.clone() for member, tensor in kv.columns.items()}
        return TextKV(columns, {place: state.clone() for place, state in kv.states.items()})

"""`KeptKV`: the keys and values of texts that were read, so that no prompt reads them again.

A prompt goes on from the longest beginning that it shares with a text that is kept, or with one
that is still being written. Texts are compared token by token; no hash is trusted. Knows token ids
and columns; not how a model is run, nor who asked for a text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.compat.states import has_states
from selfspec.forward.columns import Beginning, Columns, TextKV, first_needed
from selfspec.forward.slots import Member

Ids = NDArray[np.int64]
LEAST = 16  # A shorter beginning is read about as fast as it is found and copied.
_MOST_PARENTS = 32  # A text of more turns is copied whole.


class PromptEnd(NamedTuple):
    """What was known once a prompt was read: how long it is, and the logits after its last token.

    Only prompts of the same `scope` share what was read.
    """

    num_tokens: int
    logits: torch.Tensor | None  # (1, V); None where the prompt was not read to its end.
    scope: Hashable = None


class Text:
    """One text with its keys and values; its first `start` columns are those of its parent.

    What it holds is looked at when it is needed first, since that of a text that is still being
    written are views of slots. Running states serve only a prompt that goes on from their place.
    """

    def __init__(
        self,
        ids: Ids,
        end: PromptEnd,
        new_kv: Callable[[], TextKV],
        parent: Text | None = None,
        start: int = 0,
    ) -> None:
        self.ids = ids
        self.end = end
        self.parent = parent
        self._new_kv = new_kv
        self._start = start

    @cached_property
    def kv(self) -> TextKV:
        return self._new_kv()

    @cached_property
    def num_bytes(self) -> int:
        tensors = (*self.kv.columns.values(), *self.kv.states.values(), self.end.logits)
        return self.ids.nbytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def answers(self, num_tokens: int) -> bool:
        """Are the logits after so many tokens known?"""
        return self.end.logits is not None and self.end.num_tokens == num_tokens

    @property
    def line(self) -> list[Text]:
        """This text, its parent, the parent of that and so on."""
        line = [self]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        return line

    def num_shared(self, ids: Ids, least: int) -> int:
        """With how many tokens of `ids` it begins; 0 if these are fewer than `least`."""
        length = min(len(ids), len(self.ids))
        if length < least or self.ids[least - 1] != ids[least - 1]:
            return 0
        differs = self.ids[:length] != ids[:length]
        shared = int(differs.argmax()) if differs.any() else length
        return shared if shared >= least else 0

    def pieces(self, member: Member, start: int, end: int) -> list[torch.Tensor] | None:
        """A member's columns from `start` to `end`, in their order; None if one was dropped."""
        columns = self.kv.columns[member]
        first = len(self.ids) - columns.shape[2]
        mine = [columns[:, :, max(start - first, 0) : end - first]] if end > first else []
        if start >= min(first, end):
            return mine
        if self.parent is None or min(first, end) > self._start:
            return None
        before = self.parent.pieces(member, start, min(first, end))
        return None if before is None else [*before, *mine]

    def beginning(self, ids: Ids, shared: int, cache: Any) -> Beginning | None:
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
        return Beginning(num_columns, kv, self.end.logits if is_whole else None)


class KeptKV:
    """Texts that have ended, the least lately used first, up to a limit in bytes.

    It is for one state of one model; any thread may ask. Whoever uses a text uses its parents too,
    so a text is dropped before them.
    """

    def __init__(self, most: int | None = 0) -> None:
        self._most = most  # None: whatever `limit_to` says.
        self._limit = most or 0
        self._texts: dict[Text, None] = {}
        self._lock = threading.RLock()

    @property
    def num_bytes(self) -> int:
        """What all texts take. It is added up, so that no interrupt leaves a wrong sum."""
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
        self, ids: Ids, scope: Hashable, cache: Any, running: Iterable[Text] = ()
    ) -> Beginning | None:
        """The longest beginning of a prompt that was read already, for its empty stock cache."""
        best: Beginning | None = None
        source, most = None, LEAST - 1
        with self._lock:
            for text in (*running, *self._texts):
                shared = text.num_shared(ids, most + 1) if text.end.scope == scope else 0
                beginning = text.beginning(ids, shared, cache) if shared else None
                if beginning is not None and beginning.num_columns > most:
                    best, source, most = beginning, text, beginning.num_columns
            if source in self._texts:
                self._use(source)
        return best

    def keep(self, ids: Ids, end: PromptEnd, kv: TextKV) -> None:
        """Copies the columns of a text, up to the last of its ids, if they fit.

        What an earlier text has is not copied.
        """
        with self._lock:
            parent, start = self._nearest(ids, end.scope)
            if parent is not None:
                self._use(parent)
            new = TextKV(_without_known(kv.columns, len(ids), parent, start), kv.states)
            text = Text(ids, end, lambda: new, parent, start)
            is_known = not new.states or (parent is not None and len(parent.ids) == len(ids))
            if is_known and not any(columns.shape[2] for columns in new.columns.values()):
                return
            if sum(relative.num_bytes for relative in text.line) > self._limit:
                return
            self._drop_to(self._limit - text.num_bytes)
            try:
                copies, logits = _copy(new), None if end.logits is None else end.logits.clone()
            except RuntimeError:  # There is no memory, which running texts need more.
                self.drop()
                return
            text = Text(ids, end._replace(logits=logits), lambda: copies, parent, start)
            self._use(text)

    def _nearest(self, ids: Ids, scope: Hashable) -> tuple[Text | None, int]:
        """The text that shares the longest beginning, and how long that is."""
        nearest, most = None, LEAST - 1
        for text in self._texts:
            shared = text.num_shared(ids, most + 1) if text.end.scope == scope else 0
            if shared:
                nearest, most = text, shared
        is_short = nearest is not None and len(nearest.line) <= _MOST_PARENTS
        return (nearest, most) if is_short else (None, 0)

    def _use(self, text: Text) -> None:
        used = dict.fromkeys(text.line)  # Parents come after children, and so are dropped later.
        others = (text for text in self._texts if text not in used)
        self._texts = dict.fromkeys((*others, *used))  # At once, or not at all.

    def _drop_to(self, num_bytes: int) -> None:
        left = self.num_bytes
        while self._texts and left > num_bytes:
            text = next(iter(self._texts))
            del self._texts[text]
            left -= text.num_bytes


def _without_known(columns: Columns, length: int, parent: Text | None, start: int) -> Columns:
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

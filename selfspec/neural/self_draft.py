"""The model drafts for itself: its rounded copy reads drafts on the model's own keys and values.

The copy reads a row's committed columns as they are, and writes its own keys and values for drafted
tokens into the slots of the tree, in the order in which it reads them. Verification writes these
slots anew before it looks at them. So no prompt is read twice, and nothing is cropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.attention import grouped_attention
from selfspec.compat.generation import KV
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.forward.tree_kv import TreeKV
from selfspec.neural.named import AGAINST, named, ranked
from selfspec.neural.rounded_copy import RoundedCopy
from selfspec.records import DRAFT_MODEL, Candidate, StepRecord

Path = tuple[int, ...]  # The drafted tokens after the committed text.
# (1, 1, N, columns), by attention type if there are several.
Masks = dict[str, torch.Tensor | None] | torch.Tensor | None


class SelfDraft(Source):
    """A model's rounded copy as a source of one call; or why it has none, as `reason`."""

    name = DRAFT_MODEL

    def __init__(self, copy: RoundedCopy | str, top_k: int) -> None:
        self.reason = copy if isinstance(copy, str) else None
        self._rounded = None if isinstance(copy, str) else copy
        self._top_k = top_k

    def open(self, row: RowStart) -> SelfDraftCursor | None:
        kv = row.kv
        if self._rounded is None or kv is None:
            self.reason = self.reason or "its prompt gets chains, which have no slots"
            return None
        several = "several texts share its forwards" if row.num_rows > 1 else None
        self.reason = self.reason or several or kv.reading_reason()
        return None if self.reason else SelfDraftCursor(self._rounded, kv, row, self._top_k)

    @property
    def num_bytes(self) -> int:
        return 0 if self._rounded is None else self._rounded.num_bytes


class SharedText:
    """What the copy has read of one row's drafts in this step."""

    def __init__(self, copy: RoundedCopy, kv: TreeKV, count_forward: Callable[[], None]) -> None:
        self._copy, self._kv, self._count_forward = copy, kv, count_forward
        self._indices: dict[Path, int] = {}  # Of the slot of each path's last token.

    def forget(self) -> None:
        """The text has gone on, and verification has written over the slots."""
        self._indices = {}

    @torch.no_grad()
    def read(self, root_token: int, path: Path) -> torch.Tensor:
        """The logits (V,) after a path; reads it from its first token that was not read."""
        paths = [path[:end] for end in range(len(path) + 1) if path[:end] not in self._indices]
        num_read, (row,) = len(self._indices), self._kv.rows
        forward = self._kv.reserve([row], num_read + len(paths))
        for number, new in enumerate(paths, start=num_read):
            self._indices[new] = number
        self._kv.forward = forward._replace(front=forward.front + num_read)
        self._count_forward()
        depths = torch.tensor([[len(new) for new in paths]], device="cpu")
        with grouped_attention():
            output = self._copy.run(
                input_ids=torch.tensor([[(root_token, *new)[-1] for new in paths]], device="cpu"),
                attention_mask=self._masks(paths, forward.front),
                position_ids=torch.as_tensor(row.position, device="cpu")[..., None, None] + depths,
                use_cache=True,
                return_dict=True,
                **{KV: self._kv.cache},
                **self._copy.options,
            )
        return output.logits[0, -1]  # type: ignore[no-any-return]

    def _masks(self, paths: Sequence[Path], front: int) -> Masks:
        """What hides from each path all that is none of its ancestors; None: it sees all."""
        hidden = np.ones((len(paths), front + len(self._indices)), np.bool_)
        hidden[:, :front] = False
        for query, path in enumerate(paths):
            seen = [front + self._indices[path[:end]] for end in range(len(path) + 1)]
            hidden[query, seen] = False
        ends = np.array([front + len(path) for path in paths])
        masks, (dtype, _) = dict[str, torch.Tensor | None](), self._kv.placement
        for name, window in self._kv.attention.windows.items():
            unseen = hidden
            if window.form == "sliding":
                unseen = hidden | (np.arange(hidden.shape[1]) <= ends[:, None] - window.size)
            unseen = unseen[:, self._kv.forward.firsts[name] :]
            # Attention over one token is faster without a mask.
            is_needed = len(paths) > 1 or unseen.any()
            masks[name] = _mask_of(unseen, dtype) if is_needed else None
        return masks if len(masks) > 1 else next(iter(masks.values()))


class SelfDraftCursor(Cursor):
    """One row's drafts as the copy sees them; a state is a path, which it reads if that pays."""

    takes_time = True
    # What the copy does not name after a token that it has read is unlikely.
    evidence_against = AGAINST

    def __init__(self, copy: RoundedCopy, kv: TreeKV, row: RowStart, top_k: int) -> None:
        self._text = SharedText(copy, kv, row.count_forward)
        self._copy, self._kv, self._top_k = copy, kv, top_k
        self._budget, self._draws = row.budget, row.draws
        self._last_token: int | None = None
        self._named: dict[Path, list[Candidate]] = {}

    def root(self) -> Path:
        return ()

    def follow(self, state: Path, token: int) -> Path:
        return (*state, token)

    def read(self, state: Path, score: float) -> None:
        """Reads a path to its end if that pays; only while the row has its forwards for itself."""
        if self._last_token is None or len(self._kv.rows) != 1:
            return
        if not self._copy.pays(score, self._budget):
            return
        start = perf_counter()
        logits = self._text.read(self._last_token, state)
        likely = ranked(logits, self._top_k, self._draws, len(state))
        is_drawn = self._draws.noise(len(state)) is not None
        self._named[state] = named(likely, is_drawn=is_drawn)
        self._copy.took(perf_counter() - start)

    def expand(self, state: Path) -> list[Candidate]:
        return self._named.get(state, [])

    def observe(self, record: StepRecord) -> None:
        """Counts how often its likeliest token was right, and forgets the step."""
        for end, token in enumerate(record.committed_ids[: len(record.path)]):
            if candidates := self._named.get(tuple(record.committed_ids[:end])):
                self._copy.count(candidates[0][0] == token)
        self._text.forget()
        self._named = {}
        if record.committed_ids:
            self._last_token = record.committed_ids[-1]


def _mask_of(unseen: NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, N, columns): 0 for what is seen, else the lowest number."""
    mask = torch.zeros(unseen.shape, dtype=dtype, device="cpu")
    return mask.masked_fill_(torch.from_numpy(unseen), torch.finfo(dtype).min)[None, None]

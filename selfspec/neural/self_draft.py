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

from selfspec.attention import grouped_attention
from selfspec.compat.generation import KV
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.draft.sources.worth import ReadWorth
from selfspec.forward.layout import Window
from selfspec.forward.tree_kv import TreeKV
from selfspec.neural.named import AGAINST, named
from selfspec.neural.rounded_copy import RoundedCopy
from selfspec.records import DRAFT_MODEL, Candidate, StepRecord

Path = tuple[int, ...]  # The drafted tokens after the committed text.


class SelfDraft(Source):
    """A model's rounded copy as a source of one call; or why it has none, as `reason`."""

    name = DRAFT_MODEL

    def __init__(self, copy: RoundedCopy | str, top_k: int) -> None:
        self.copy, self.reason = (None, copy) if isinstance(copy, str) else (copy, None)
        self._top_k = top_k

    def open(self, row: RowStart) -> SelfDraftCursor | None:
        kv = row.kv
        if self.copy is None or kv is None:
            self.reason = self.reason or "the model verifies chains, which have no slots"
            return None
        self.reason = self.reason or kv.reading_reason()
        return None if self.reason else SelfDraftCursor(self.copy, kv, row, self._top_k)


class SharedText:
    """What the copy has read of one row's drafts in this step."""

    def __init__(self, copy: RoundedCopy, kv: TreeKV, count_forward: Callable[[], None]) -> None:
        self._copy, self._kv, self._count_forward = copy, kv, count_forward
        self._indices: dict[Path, int] = {}  # Of the slot of each path's last token.

    def forget(self) -> None:
        """The text has gone on, and verification has written over the slots."""
        self._indices = {}

    def has_read(self, path: Path) -> bool:
        return path in self._indices

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
                position_ids=torch.as_tensor(row.position)[..., None, None] + depths,
                use_cache=True,
                return_dict=True,
                **{KV: self._kv.cache},
                **self._copy.options,
            )
        return output.logits[0, -1]  # type: ignore[no-any-return]

    def _masks(
        self, paths: Sequence[Path], front: int
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        """(1, 1, N, columns), by attention type if there are several: 0 for what a path sees."""
        hidden = np.ones((len(paths), front + len(self._indices)), np.bool_)
        hidden[:, :front] = False
        for query, path in enumerate(paths):
            hidden[query, [front + self._indices[path[:end]] for end in range(len(path) + 1)]] = False
        dtype, _ = self._kv.placement
        masks = {}
        for name, window in self._kv.attention.windows.items():
            first = self._kv.forward.firsts[name]
            seen = hidden[:, first:] | _outside(window, paths, front, first, hidden.shape[1])
            mask = torch.zeros(seen.shape, dtype=dtype)
            masks[name] = mask.masked_fill_(torch.from_numpy(seen), torch.finfo(dtype).min)[None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

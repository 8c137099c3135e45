"""The model drafts for itself: its rounded copy reads drafts on the model's own keys and values.

The copy reads a row's committed columns as they are, and writes its own keys and values for drafted
tokens into the slots of the tree, in the order in which it reads them. Verification writes these
slots anew before it looks at them. So no prompt is read twice, and nothing is cropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.attention import grouped_attention
from selfspec.compat.generation import KV
from selfspec.draft.sources.source import RowStart, Source
from selfspec.forward.tree_kv import TreeKV
from selfspec.neural.draft_cursor import DraftCursor, Path
from selfspec.neural.rounded_copy import RoundedCopy
from selfspec.records import DRAFT_MODEL, TimeBudget

# (1, 1, N, columns), by attention type if there are several.
Masks = dict[str, torch.Tensor | None] | torch.Tensor | None


class CopySource(Source):
    """A model's rounded copy as a source of one call; or why it has none, as `reason`."""

    name = DRAFT_MODEL

    def __init__(self, copy: RoundedCopy | str, top_k: int) -> None:
        self.reason = copy if isinstance(copy, str) else None
        self._rounded = None if isinstance(copy, str) else copy
        self._top_k = top_k

    def open(self, row: RowStart) -> DraftCursor | None:
        copy, kv = self._rounded, row.kv
        if copy is None or kv is None:
            self.reason = self.reason or "its prompt gets chains, which have no slots"
            return None
        several = "several texts share its forwards" if row.num_rows > 1 else None
        self.reason = self.reason or several or kv.reading_reason()
        if self.reason:
            return None
        text = CopyText(copy, kv, row.count_forward)
        return DraftCursor(text, row, self._top_k, copy.worth)

    @property
    def num_bytes(self) -> int:
        return 0 if self._rounded is None else self._rounded.num_bytes


class CopyText:
    """The drafts of one row that the copy has read in this step."""

    def __init__(self, copy: RoundedCopy, kv: TreeKV, count_forward: Callable[[], None]) -> None:
        self._copy, self._kv, self._count_forward = copy, kv, count_forward
        self._last_token: int | None = None  # of the committed text
        self._indices: dict[Path, int] = {}  # The slot of each path's last token.

    def prepare(self, budget: TimeBudget) -> None:
        """The model has read the prompt."""

    def observe(self, committed: Sequence[int]) -> None:
        """Verification has written over the slots."""
        self._indices = {}
        if committed:
            self._last_token = committed[-1]

    @torch.no_grad()
    def read(self, path: Path) -> torch.Tensor | None:
        """Reads a path from its first token that was not read; only while the row is alone."""
        if self._last_token is None or len(self._kv.rows) != 1:
            return None
        paths = [path[:end] for end in range(len(path) + 1) if path[:end] not in self._indices]
        num_read, (row,) = len(self._indices), self._kv.rows
        forward = self._kv.reserve([row], num_read + len(paths))
        for number, new in enumerate(paths, start=num_read):
            self._indices[new] = number
        self._kv.forward = forward._replace(tree_start=forward.tree_start + num_read)
        self._count_forward()
        ids = [[(self._last_token, *new)[-1] for new in paths]]
        depths = torch.tensor([[len(new) for new in paths]], device="cpu")
        with grouped_attention():
            output = self._copy.run(
                input_ids=torch.tensor(ids, device="cpu"),
                attention_mask=self._masks(paths, forward.tree_start),
                position_ids=torch.as_tensor(row.position, device="cpu")[..., None, None] + depths,
                use_cache=True,
                return_dict=True,
                **{KV: self._kv.cache},
                **self._copy.options,
            )
        return output.logits[0, -1]  # type: ignore[no-any-return]

    def _masks(self, paths: Sequence[Path], tree_start: int) -> Masks:
        """The masks that hide from each path all but its ancestors; None: it sees all."""
        hidden = np.ones((len(paths), tree_start + len(self._indices)), np.bool_)
        hidden[:, :tree_start] = False
        for query, path in enumerate(paths):
            seen = [tree_start + self._indices[path[:end]] for end in range(len(path) + 1)]
            hidden[query, seen] = False
        ends = np.array([tree_start + len(path) for path in paths])
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


def _mask_of(unseen: NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, N, columns): 0 for what is seen, else the lowest number."""
    mask = torch.zeros(unseen.shape, dtype=dtype, device="cpu")
    return mask.masked_fill_(torch.from_numpy(unseen), torch.finfo(dtype).min)[None, None]

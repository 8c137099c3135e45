"""What runs a model over drafts: trees over slots of keys and values, or chains (`chains`)."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache

from selfspec.compat.generation import KV
from selfspec.compat.states import columns_of, states_by_place
from selfspec.errors import UnsupportedError
from selfspec.forward.chains import ChainBackend
from selfspec.forward.columns import TextKV
from selfspec.forward.eager import CaptureFailed, EagerForwards, Forwards, Logits
from selfspec.forward.layout import InputShape, write
from selfspec.forward.model import AttentionTypes, Forwarded, device_of, forwarded
from selfspec.forward.prompt import Prefilled, next_positions
from selfspec.forward.rows import KVRow
from selfspec.forward.sizes import ENDLESS
from selfspec.forward.slots import LARGE, members_in, split
from selfspec.forward.tree_kv import TreeKV
from selfspec.records import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TreeBackend:
    """Trees of several rows in one forward, through 4-D masks.

    Has no rows at first. `forwards` runs what is laid out here, eagerly or as captured graphs, and
    has the slots. Where captured forwards can't be had, the rows go on eagerly over the same slots.
    If only memory was short, or a forward failed, the next prompt finds captured ones again. The KV
    of an accepted path is moved right after the walk, so that the KV is complete between any two
    steps, and costs nothing if the path already lies in the right slots.

    If rows come and go, all have the same number of columns. When a row leaves, the last one moves
    into its place, so that the rows lie side by side, as a forward needs them.
    """

    chains_only = False

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionTypes,
        forwards: Forwards | None = None,  # None: eager ones.
        *,
        strict: bool = False,
    ) -> None:
        self._model = model
        self._attention = attention
        self._forwards: Forwards = EagerForwards(attention) if forwards is None else forwards
        self._strict = strict
        self._captured: Forwards | None = None  # Captured ones, in place of which eager ones run.
        self.setting_up = 0.0  # Seconds of the last `lay_out` that went into a capture.
        self.kv.clear()

    @property
    def kv(self) -> TreeKV:
        """The slots of rows that may leave; chains have none, and all rows leave together."""
        return self._forwards.kv

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        return self._forwards.kind

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        return self._forwards.reason

    @property
    def front(self) -> int:
        """How many columns of the KV are in front of the next tree."""
        return self.kv.front

    def admit(
        self,
        prompt: Prefilled,
        rows: Sequence[KVRow],
        others: Sequence[KVRow],
        *,
        max_new_columns: int,
        max_tree: int,
    ) -> None:
        """Takes in the rows of a prompt that was read.

        `others` are the rows that are there; only rows that come first may be padded.
        `max_new_columns` is how far after the prompt the last token may be, drafted or not, and
        `max_tree` the most queries of a row in one forward.
        """
        visible = None if prompt.visible is None else prompt.visible.to(device_of(self._model))
        positions = next_positions(self._model, prompt.input_ids, prompt.model_kwargs)
        most = columns_of(prompt.cache) + max_new_columns + max_tree
        self.add(prompt.cache, positions, visible, rows=rows, others=others, max_columns=most)

    def add(
        self,
        cache: Cache,
        following: torch.Tensor,  # (..., B, 1): the position id of each row's next token
        visible: torch.Tensor | None = None,  # (B, P) bool; None if all columns count
        *,
        rows: Sequence[KVRow] = (),  # Those that get it; new ones by default.
        others: Sequence[KVRow] = (),
        max_columns: int = ENDLESS,  # How many each row may come to need.
    ) -> Sequence[KVRow]:
        """Takes in the KV of a prompt. If this breaks off, nothing has changed."""
        length, positions = columns_of(cache), following[..., 0].cpu().numpy()
        num_rows = positions.shape[-1]
        # As transformers counts it: a row that is all padding begins after the prompt.
        starts = [0] * num_rows if visible is None else (visible.cumsum(-1) == 0).sum(-1).tolist()
        rows = rows or [KVRow() for _ in starts]
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            row.num_columns, row.max_columns, row.start = length, max_columns, start
            row.position = positions[..., index]
        if self._captured is not None:  # There may be memory for them by now.
            self._forwards, self._captured = self._captured, None
            self.kv.policy = self.kv.policy._replace(is_fixed=True)
        try:
            self.kv.add(cache, rows, others)
        except torch.OutOfMemoryError:
            if not self._go_on_eagerly("there is no memory for fixed KV slots beside the prompt"):
                raise
            self.kv.add(cache, rows, others)
        if visible is not None:  # One more column represents all columns after the prompt.
            self.kv.visible = pad(visible, (0, 1), value=True)
        return rows

    def max_width(self, max_nodes: int) -> int:
        """How wide the next forward may be, so that no tree crosses a change of scale."""
        period = self._attention.scale_period
        if not period:
            return max_nodes
        return min(max_nodes, period - (self.kv.front + 1) % period)

    def lay_out(self, rows: Sequence[KVRow], trees: Sequence[DraftTree]) -> Logits:
        """The next forward, whose inputs are on the device; makes room for it in the KV."""
        start = perf_counter()
        if len(rows) < len(self.kv.rows):
            self._go_on_eagerly("a forward over all rows failed", may_refuse=False)
        try:
            run = self._laid_out(rows, trees)
            self.setting_up = self._forwards.setting_up
            return run
        except torch.OutOfMemoryError:
            if not self._go_on_eagerly("there is no memory for more captured forwards"):
                raise
        except CaptureFailed as failed:
            self._go_on_eagerly(str(failed))
            self._captured = None  # It would fail again.
        self.setting_up = perf_counter() - start
        return self._laid_out(rows, trees)

    def _laid_out(self, rows: Sequence[KVRow], trees: Sequence[DraftTree]) -> Logits:
        """The next forward as `forwards` runs it."""
        width = max(len(tree.tokens) for tree in trees)
        lead, num_types = rows[0].position.shape, len(self._attention.windows)
        needed = InputShape(len(rows), width, lead, num_types)
        shape = self._forwards.fitting(needed)
        forward = self.kv.reserve(rows, shape.width, shape.rows)
        run = self._forwards.ready(self._model, shape, write(trees, forward, shape))
        if shape == needed:
            return run
        return lambda: run()[: len(rows), :width]

    def _go_on_eagerly(self, reason: str, *, may_refuse: bool = True) -> bool:
        """Runs captured forwards by plain operations, in the same slots; were there any?

        `strict` refuses what was not asked for, but not what a fault in one forward makes
        necessary.
        """
        if not self.kv.policy.is_fixed:
            return False
        if self._strict and may_refuse:
            raise UnsupportedError(f"strict=True and forwards can't be as asked: {reason}")
        self._captured = self._forwards
        self.kv.policy = self.kv.policy._replace(is_fixed=False)
        self._forwards = EagerForwards(self._attention, kv=self.kv, reason=reason)
        return True

    @property
    def shows_states(self) -> bool:
        """A replay runs no hook."""
        return isinstance(self._forwards, EagerForwards)

    def forward(self, layout: Logits, *, with_states: bool = False) -> Forwarded:
        """The logits, which the next captured forward overwrites, and the hidden states."""
        return forwarded(self._model, layout, with_states=with_states and self.shows_states)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path, which starts at the root, and forgets the rest."""
        self.kv.commit(paths)

    def num_columns(self, row: KVRow) -> int:
        """How many of a row's columns are there, all committed."""
        return row.num_columns

    def text_kv(self, row: KVRow) -> TextKV:
        return self.kv.text_kv(row)

    def wipe(self, rows: Sequence[int]) -> None:
        """Removes what drafts have left after the committed columns of these rows of a forward."""
        self.kv.wipe(rows)

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back; `fills` says whether anybody gets the cache."""
        self.kv.release(fills=fills)


Backend = TreeBackend | ChainBackend


def bytes_of_rows(model: PreTrainedModel, max_rows: int) -> tuple[int, int]:
    """What one column takes in each of `max_rows` rows that come and go, and all their states.

    With it counts the column of a prompt that is being read, and the copy of a part that is made
    when rows get more columns. Reads a token, whose KV shows what is exact.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{KV: cache})
    # Some layers keep nothing, or states alone.
    has_keys = [getattr(layer, "keys", None) is not None for layer in cache.layers]
    members = members_in(cache, ["any" if has else None for has in has_keys])
    sizes = [part.column_bytes for part in split(members, LARGE)]
    states = sum(state.nbytes for state in states_by_place(cache.layers).values())
    return sum(sizes) * (max_rows + 1) + max(sizes, default=0) * max_rows, states * (max_rows + 1)

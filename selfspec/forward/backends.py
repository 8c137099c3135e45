"""What runs a model over drafts: trees over slots of keys and values, or chains (`chains`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache

from selfspec.compat.generation import KV
from selfspec.compat.states import columns_of, states_by_place
from selfspec.errors import UnsupportedError
from selfspec.forward.chains import ChainBackend
from selfspec.forward.columns import KVRow
from selfspec.forward.layout import InputShape, hiding, pack_inputs, unpack_inputs
from selfspec.forward.model import (
    AttentionTypes,
    EagerForwards,
    Logits,
    device_of,
    logits_of,
)
from selfspec.forward.prompt import Prefilled, next_positions
from selfspec.forward.sizes import ENDLESS, Policy
from selfspec.forward.slots import LARGE, members_in, split
from selfspec.forward.tree_kv import TreeKV
from selfspec.machine.device import upload
from selfspec.records import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAPTURED = "graph"  # What `GenerationStats.forward` calls captured forwards.


class CaptureFailed(Exception):
    """A forward can't be captured; the message says why."""


class CapturedForwards(Protocol):
    """Forwards of fixed shape over slots, captured as graphs (`cuda/runner`)."""

    kv: TreeKV
    setting_up: float  # How many seconds of the last `ready` a capture took, which serves others.

    def fitting(self, shape: InputShape) -> InputShape:
        """The shape of the captured forward that has room for inputs of `shape`."""
        ...

    def ready(self, model: PreTrainedModel, shape: InputShape, inputs: torch.Tensor) -> Logits:
        """Sends the inputs of the next forward, for which there are slots; returns what runs it.

        Raises `CaptureFailed`, or `torch.OutOfMemoryError`.
        """
        ...


class TreeBackend:
    """Trees of several rows in one forward, through 4-D masks.

    Has no rows at first. Forwards are run eagerly, or by `captured` ones, which have the slots.
    Where these can't be had, the rows go on eagerly over the same slots. If only memory was short,
    or a forward failed, the next prompt finds captured ones again. The KV of an accepted path is
    moved right after the walk, so that the KV is complete between any two steps, and costs nothing
    if the path already lies in the right slots.

    If rows come and go, all have the same number of columns. When a row leaves, the last one moves
    into its place, so that the rows lie side by side, as a forward needs them.
    """

    chains_only = False

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionTypes,
        captured: CapturedForwards | None = None,
        *,
        policy: Policy = Policy(),  # noqa: B008 has no state
        eager: EagerForwards = EagerForwards(),  # noqa: B008 has no state
    ) -> None:
        """`policy` is that of the slots which captured forwards do not have."""
        if captured is None:
            self.kv = TreeKV(attention, policy)
        else:
            self.kv = captured.kv
            self.kv.clear()
        self.reason, self.packing_note = eager.reason, eager.packing_note
        self.setting_up = 0.0  # Seconds of the last `lay_out` that went into a capture.
        self._model = model
        self._attention = attention
        self._captured = captured
        self._eager_name = eager.name

    @property
    def is_captured(self) -> bool:
        """Are forwards captured at present?"""
        return self.kv.policy.is_fixed

    @property
    def forward_name(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        return CAPTURED if self.is_captured else self._eager_name

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
        num_columns = columns_of(prompt.cache)
        if visible is not None and num_columns not in (0, visible.shape[1]):
            raise UnsupportedError(
                f"the columns of a padded prompt must be its tokens (got {num_columns} columns for "
                f"{visible.shape[1]} tokens); call generate() for each prompt"
            )
        positions = next_positions(self._model, prompt.input_ids, prompt.model_kwargs)
        most = num_columns + max_new_columns + max_tree
        self.add(prompt.cache, positions, visible, rows=rows, others=others, max_columns=most)

    def add(
        self,
        cache: Cache,
        following: torch.Tensor,  # (..., B, 1): the position id of each row's next token
        visible: torch.Tensor | None = None,  # (B, P) bool; None if all columns count
        *,
        rows: Sequence[KVRow] = (),  # The rows that get the KV; by default, new ones.
        others: Sequence[KVRow] = (),
        max_columns: int = ENDLESS,  # How many each row may come to need.
    ) -> Sequence[KVRow]:
        """Takes in the KV of a prompt. If this breaks off, nothing has changed."""
        length, positions = columns_of(cache), following[..., 0].cpu().numpy()
        num_rows = positions.shape[-1]
        # A row that is all padding begins after the prompt, as transformers counts.
        starts = [0] * num_rows if visible is None else (visible.cumsum(-1) == 0).sum(-1).tolist()
        rows = rows or [KVRow() for _ in starts]
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            row.num_columns, row.max_columns, row.start = length, max_columns, start
            row.position = positions[..., index]
        if self._captured is not None:  # There may be memory for captured forwards by now.
            self.kv.policy, self.reason = self.kv.policy._replace(is_fixed=True), None
        try:
            self.kv.add(cache, rows, others)
        except torch.OutOfMemoryError:
            if not self.is_captured:
                raise
            self._go_on_eagerly("there is no memory for fixed KV slots beside the prompt")
            self.kv.add(cache, rows, others)
        if visible is not None:  # One more column represents all columns after the prompt.
            self.kv.visible = pad(visible, (0, 1), value=True)
        return rows

    def max_width(self, max_nodes: int) -> int:
        """How wide the next forward may be, so that no tree crosses a change of scale."""
        period = self._attention.scale_period
        if not period:
            return max_nodes
        return min(max_nodes, period - (self.kv.tree_start + 1) % period)

    def lay_out(self, rows: Sequence[KVRow], trees: Sequence[DraftTree]) -> Logits:
        """The next forward, whose inputs are on the device; makes room for it in the KV."""
        width = max(len(tree.tokens) for tree in trees)
        lead, num_types = rows[0].position.shape, len(self._attention.windows)
        shape = InputShape(len(rows), width, lead, num_types)
        self.setting_up, run = 0.0, None
        if self.is_captured and len(rows) < len(self.kv.rows):
            self._go_on_eagerly("a forward over all rows failed")
        if self.is_captured:
            run = self._captured_run(rows, trees, shape)
        return run or self._eager_run(rows, trees, shape)

    def _captured_run(
        self, rows: Sequence[KVRow], trees: Sequence[DraftTree], needed: InputShape
    ) -> Logits | None:
        """The next forward as a captured one, which may be wider; None if it can't be had."""
        start, captured = perf_counter(), self._captured
        assert captured is not None
        try:
            shape = captured.fitting(needed)
            forward = self.kv.reserve(rows, shape.width, shape.rows)
            run = captured.ready(self._model, shape, pack_inputs(trees, forward, shape))
            self.setting_up = captured.setting_up
            return run if shape == needed else lambda: run()[: needed.rows, : needed.width]
        except torch.OutOfMemoryError:
            self._go_on_eagerly("there is no memory for more captured forwards")
        except CaptureFailed as failed:
            self._go_on_eagerly(str(failed))
            self._captured = None  # Captures would fail again.
        self.setting_up = perf_counter() - start
        return None

    def _eager_run(
        self, rows: Sequence[KVRow], trees: Sequence[DraftTree], shape: InputShape
    ) -> Logits:
        """The next forward by plain operations."""
        kv, windows, functions = self.kv, self._attention.windows, self._attention.functions
        forward = kv.reserve(rows, shape.width)
        dtype, device = kv.placement
        end, has_padding = forward.tree_start + shape.width, kv.visible is not None
        layout = unpack_inputs(
            upload(pack_inputs(trees, forward, shape), device),
            shape,
            windows=hiding(windows, forward, shape.width, has_padding=has_padding),
            num_keys={name: end - first for name, first in forward.firsts.items()},
            visible=kv.visible,
            dtype=dtype,
        )
        return partial(logits_of, self._model, layout, kv.cache, kv.states, functions)

    def _go_on_eagerly(self, reason: str) -> None:
        """Runs forwards by plain operations, in the slots of the captured ones."""
        self.kv.policy, self.reason = self.kv.policy._replace(is_fixed=False), reason

    @property
    def shows_states(self) -> bool:
        """A replay runs no hook."""
        return not self.is_captured


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

"""What runs a model over drafts: the interface, and trees over slots of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import KV
from selfspec.cuda.runner import StaticRunner, stepped
from selfspec.errors import UnsupportedError
from selfspec.forward.layout import InputShape, RowState, hiding, read, write
from selfspec.forward.model import AttentionTypes, device_of, logits_of
from selfspec.forward.prompt import Prefilled
from selfspec.forward.tree_kv import ENDLESS, TreeKV, bytes_per_token
from selfspec.machine.device import upload
from selfspec.records import DraftTree

__all__ = ["Backend", "TreeBackend", "eager", "kv_bytes_per_token"]

Logits = Callable[[], torch.Tensor]  # Runs a forward and gives its logits (B, Q, V).

# There are this many KV slots after the prompt at first, if the text may become that long.
# Fixed slots start with more, since adding some voids what was captured.
_MIN_ROOM = 256
_MIN_STATIC_ROOM = 4096


class Backend(Protocol):
    """Runs the model over drafts of some rows, and keeps the KV of the accepted paths."""

    chains_only: bool  # Does it take no trees?

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        ...

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        ...

    @property
    def setting_up(self) -> float:
        """Seconds of the last `lay_out` that went into what later forwards will use too."""
        ...

    @property
    def front(self) -> int:
        """How many columns of the KV are in front of the next tree."""
        ...

    @property
    def num_pending(self) -> int | None:
        """How many committed tokens the next forward reads again; None if none ever has to be."""
        ...

    def admit(self, prompt: Prefilled, *, reach: int, width: int) -> None:
        """Takes in the rows of a prompt that was read.

        `reach` is how far after the prompt the last token may be, drafted or not, and `width` the
        most queries of a row in one forward.
        """
        ...

    def max_width(self, max_nodes: int) -> int:
        """How many of `max_nodes` nodes the next forward may have."""
        ...

    def lay_out(self, trees: Sequence[DraftTree]) -> Any:
        """The arguments of one forward."""
        ...

    def forward(self, layout: Any) -> torch.Tensor:
        """The logits (B, Q, V) of every node."""
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path, which starts at the root, and forgets the rest."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front in this order."""
        ...

    def only(self, rows: slice) -> AbstractContextManager[None]:
        """Inside, forwards have these rows alone, and the others stay as they are."""
        ...

    def release(self, *, fills: bool = True) -> None:
        """Gives the cache its stock layers back; `fills` says whether anybody gets the cache."""
        ...


def eager() -> str:
    """How a model is run that nothing else is known of."""
    return "eager"


class TreeBackend:
    """Trees of several rows in one forward, through 4-D masks.

    Has no rows at first. With a `runner`, forwards have one of a few shapes and are captured; the
    KV of an accepted path is moved right after the walk all the same, and not in the next replay.
    So the move runs while the CPU drafts, costs nothing if the path already lies in the right
    slots, and leaves the KV complete between any two steps.

    With `max_rows`, rows come and go, and all have the same number of columns. When a row leaves,
    the last one moves into its place, so that the rows lie side by side, as a forward needs them.
    `max_bytes` is what keys and values may take then, among them those of a prompt that is being
    read, which has one share of `max_rows + 1`, and the copy of a part that is made when rows get
    more columns. None: there is no limit.
    """

    num_pending = None
    chains_only = False

    def __init__(
        self,
        model: Any,
        attention: AttentionTypes,
        *,
        kind: Callable[[], str] = eager,  # how forwards are run that are not captured
        runner: StaticRunner | None = None,
        reason: str | None = None,
        strict: bool = False,
        max_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.max_tokens = self.max_prompt = None
        if max_rows is not None and max_bytes is not None:
            whole, part = bytes_per_token(_cache_of_one_token(model))
            self.max_prompt = max_bytes // (whole * (max_rows + 1) + part * max_rows)
            self.max_tokens = self.max_prompt * max_rows
        self._model = model
        self._attention = attention
        self._device = device_of(model)
        self._kind = kind
        self._runner = runner
        self._reason = reason
        self._strict = strict
        self._comes_and_goes = max_rows is not None
        self._visible: torch.Tensor | None = None  # (B, P + 1): which columns count.
        if runner is None:
            self.kv = TreeKV(attention, max_rows=max_rows, max_tokens=self.max_tokens)
        else:
            self.kv = runner.kv
            self.kv.clear()

    @property
    def kind(self) -> str:
        """How forwards are run, as `GenerationStats.forward` names it."""
        return self._kind() if self._runner is None else self._runner.kind

    @property
    def reason(self) -> str | None:
        """Why forwards are not run as the config asks; None if they are."""
        return self._reason if self._runner is None else self._runner.reason

    @property
    def setting_up(self) -> float:
        """Seconds of the last `lay_out` that went into a capture."""
        return 0.0 if self._runner is None else self._runner.setting_up

    @property
    def front(self) -> int:
        """How many columns are in front of the next tree."""
        return self.kv.front

    def admit(self, prompt: Prefilled, *, reach: int, width: int) -> None:
        """Takes in the rows of a prompt that was read. Only those that come first may be padded."""
        length, num_columns = prompt.input_ids.shape[1], int(prompt.cache.get_seq_length())
        if self._comes_and_goes:
            room = max(self.front, num_columns)
        else:  # All that may come, or as much as the prompt has.
            least = _MIN_ROOM if self._runner is None else _MIN_STATIC_ROOM
            room = min(reach, max(length, least)) + width
        visible = None if prompt.visible is None else prompt.visible.to(self._device)
        sizes: Any = {"need": num_columns + reach + width, "room": room, "widest": width}
        try:
            self.add(prompt.cache, prompt.next_positions(self._model), visible, **sizes)
        except torch.OutOfMemoryError:
            if self._runner is None:
                raise
            self._reason = "there is no memory for fixed KV slots next to the prompt's"
            if self._strict:
                raise UnsupportedError(
                    f"strict=True and forward='graph' can't be had: {self._reason}"
                ) from None
            self._runner, self.kv = None, TreeKV(self._attention)
            self.admit(prompt, reach=reach, width=width)

    def add(
        self,
        cache: Any,
        next_positions: torch.Tensor,  # (..., B, 1): the position id of each row's next token
        visible: torch.Tensor | None = None,  # (B, P) bool; None if all columns count
        *,
        need: int = ENDLESS,
        room: int,
        widest: int = 1,
    ) -> None:
        """Takes in the KV of a prompt; `TreeKV.add` says what the numbers are."""
        positions = next_positions[..., 0].cpu().numpy()
        num_rows = positions.shape[-1]
        # As transformers counts it: a row that is all padding begins after the prompt.
        starts = [0] * num_rows if visible is None else (visible.cumsum(-1) == 0).sum(-1).tolist()
        if self._runner is not None:
            self._runner.show(visible, num_rows, int(cache.get_seq_length()))
            widest = stepped(widest)
        # If this breaks off, the cache is whole, and nothing else has changed.
        self.kv.add(cache, num_rows, need=need, room=max(room, widest), widest=widest)
        if visible is not None and self._runner is None:
            # One more column represents all columns after the prompt, which always count.
            self._visible = pad(visible, (0, 1), value=True)
        for number, row in enumerate(self.kv.rows[-num_rows:]):
            row.start, row.position = starts[number], positions[..., number]

    def max_width(self, max_nodes: int) -> int:
        """How wide the next forward may be, so that no tree crosses a change of scale."""
        period = self._attention.scale_period
        if not period:
            return max_nodes
        return min(max_nodes, period - (self.kv.front + 1) % period)

    def lay_out(self, trees: Sequence[DraftTree]) -> Logits:
        """The next forward, whose inputs are on the device; makes room for it in the KV."""
        kv, runner, windows = self.kv, self._runner, self._attention.windows
        rows, width = len(trees), max(len(tree.tokens) for tree in trees)
        shape = InputShape(rows, width, kv.rows[0].position.shape, len(windows))
        if runner is not None:
            rows = min(stepped(rows), runner.num_rows)
            shape = shape._replace(rows=rows, width=stepped(width))
        kv.reserve(shape.width)
        state = RowState(
            kv.lengths,
            np.stack([row.position for row in kv.rows], axis=-1),
            [row.start for row in kv.rows],
            [kv.first_columns[name] for name in windows],
            kv.front,
        )
        inputs = write(trees, state, shape)
        if runner is not None:
            run, num_rows = runner.ready(self._model, shape, inputs), len(trees)
            return lambda: run()[:num_rows, :width]
        layout = read(
            upload(inputs, self._device),
            shape,
            windows=hiding(windows, state, width, has_padding=self._visible is not None),
            num_keys={name: kv.front - kv.first_columns[name] + width for name in windows},
            visible=self._visible,
            dtype=kv.dtype,
        )
        return partial(logits_of, self._model, layout, kv.cache)

    def forward(self, layout: Logits) -> torch.Tensor:
        """The logits (B, Q, V), which the next captured forward overwrites."""
        logits = layout()
        if self._strict and self.reason is not None:
            raise UnsupportedError(f"strict=True and forwards can't be as asked: {self.reason}")
        return logits

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the KV of each row's path and forgets the rest."""
        self.kv.commit(paths)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, which move to the front in this order."""
        index = list(rows)
        self.kv.keep_rows(index)
        if self._runner is not None:
            self._runner.keep_rows(index)
        if self._visible is not None:
            self._visible = self._visible[index]

    def only(self, rows: slice) -> AbstractContextManager[None]:
        """Inside, forwards have these rows alone. Rows that come and go are never padded."""
        return self.kv.only(rows)

    def release(self, *, fills: bool = True) -> None:
        """Gives the stock cache its contents back; `fills` says whether anybody gets it."""
        self.kv.release(fills=fills)


def kv_bytes_per_token(model: Any) -> int:
    """What the keys and values of one token take; reads a token to find out."""
    return bytes_per_token(_cache_of_one_token(model))[0]


def _cache_of_one_token(model: Any) -> DynamicCache:
    """Shows the shape, the dtype and the device of each layer's keys and values."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{KV: cache})
    return cache

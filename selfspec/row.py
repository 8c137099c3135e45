"""`Row`: one text, from its prompt to its last token.

It holds its tokens, what chooses them and when it stops, what it drafts from, and what was counted
for it. It knows neither the other rows of a batch nor how a forward is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from selfspec.draft.drafter import Drafter
from selfspec.forward.columns import KVRow
from selfspec.machine.device import upload
from selfspec.records import DraftTree
from selfspec.stats import GenerationStats
from selfspec.verify.choosers import Chooser, GreedyChooser

_NUM_AT_FIRST = 256  # New tokens for which there is memory in the ids that processors read.


class Streamer(Protocol):
    """transformers' streamer protocol."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


class ReaderGone(Exception):
    """Ends a text that nobody reads any more."""


class Stops(NamedTuple):
    """What ends a row before its greatest length, by looking at this row alone."""

    eos_ids: frozenset[int] = frozenset()
    criteria: tuple[Callable[[torch.Tensor, Any], torch.Tensor], ...] = ()


def _no_listener() -> None: ...


@dataclass(eq=False, kw_only=True)
class Row(KVRow):
    """One row of a batch, made when its prompt was read.

    `index` names it in records. What it commits is kept as plain numbers, and written to a tensor
    once somebody reads that: a device is neither written to nor waited for at each token.
    """

    prompt: torch.Tensor  # (1, P), padding included
    prompt_ids: list[int]  # without padding
    drafter: Drafter
    index: int = 0
    chooser: Chooser = field(default_factory=GreedyChooser)
    max_length: int  # of the text, the prompt with its padding included
    max_nodes: int = sys.maxsize  # of its trees, where its call asks for few
    stops: Stops = Stops()  # noqa: RUF009 has no state
    pad_token_id: int = 0
    gets_pads: bool = False  # once it has stopped and others have not, as rows of transformers do
    fails_alone: bool = False  # Does an error of its own end this row and no other?
    may_leave: bool = True  # the batch, once it has stopped
    stats: GenerationStats = field(default_factory=GenerationStats)
    on_token: Callable[[], None] = _no_listener  # called once a token was committed

    def __post_init__(self) -> None:
        self.new_ids: list[int] = []
        self.tree = DraftTree.of_root(self.last_token)  # The drafts of a step.
        self.prompt_logits: Any = None  # If others may go on after it.
        self.is_done = False
        self.error: Exception | None = None  # What has ended it, if that was an error.
        self.is_spoiled = False  # Did its last step lead to NaN? Then the next one drafts nothing.
        self._ids: torch.Tensor | None = None  # (1, L), longer than the text
        self._num_written = 0

    @property
    def last_token(self) -> int:
        ids = self.new_ids or self.prompt_ids
        return ids[-1] if ids else 0

    @property
    def num_new(self) -> int:
        return len(self.new_ids)

    @property
    def length(self) -> int:
        return self.prompt.shape[1] + len(self.new_ids)

    @property
    def device(self) -> torch.device:
        return self.prompt.device

    @property
    def is_padded(self) -> bool:
        """Does the row get nothing but pads from now on?"""
        return self.gets_pads and self.is_done

    @property
    def most_nodes(self) -> int:
        """How many nodes its next tree may have, the root among them."""
        return 1 if self.is_padded or self.is_spoiled else self.max_nodes

    @property
    def max_depth(self) -> int:
        """How many drafts can still be committed, followed by a token of the model's own.

        transformers never reads the positions after that, and a model may not have them.
        """
        return max(self.max_length - self.length - 1, 0)

    def prefix(self) -> torch.Tensor:
        """(1, L): what transformers' processors and criteria read of this row so far."""
        length, waiting = self.length, self.new_ids[self._num_written :]
        if self._ids is None or self._ids.shape[1] < length:
            ids = self.prompt.long() if self._ids is None else self._ids
            self._ids = ids.new_empty(1, max(2 * ids.shape[1], length) + _NUM_AT_FIRST)
            self._ids[:, : ids.shape[1]] = ids
        if waiting:
            many = len(waiting) > 1  # A single number can be written without a tensor.
            self._ids[0, length - len(waiting) : length] = (
                upload(torch.tensor(waiting, device="cpu"), self.device) if many else waiting[0]
            )
            self._num_written = len(self.new_ids)
        return self._ids[:, :length]

    def commit(self, token: int) -> bool:
        """Takes in a token and calls `on_token`; does the row stop with it?"""
        self.new_ids.append(token)
        self.is_done = (
            token in self.stops.eos_ids
            or self.length >= self.max_length
            or any(bool(criterion(self.prefix(), None).any()) for criterion in self.stops.criteria)
        )
        self.on_token()
        return self.is_done

    def fail(self, error: Exception) -> None:
        self.error, self.is_done, self.on_token = error, True, _no_listener

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside is work for this row alone: an error there ends no other row that fails alone."""
        try:
            yield
        except Exception as error:
            if not self.fails_alone:
                raise
            self.fail(error)


def output_of(rows: list[Row]) -> torch.Tensor:
    """(B, L): prompts and answers, rows that stopped early filled up with the pad token."""
    longest = max(row.num_new for row in rows)
    new = [[*row.new_ids, *[row.pad_token_id] * (longest - row.num_new)] for row in rows]
    prompts = torch.cat([row.prompt for row in rows]).long()
    answers = upload(torch.tensor(new, dtype=torch.long, device="cpu"), prompts.device)
    return torch.cat([prompts, answers], dim=1)


def stream_to(streamer: Streamer, rows: list[Row]) -> None:
    """Lets a streamer get each column once every row has reached it, in order."""
    num_streamed = 0

    def put_columns() -> None:
        nonlocal num_streamed
        running = [row.num_new for row in rows if not row.is_done]
        front = min(running) if running else max(row.num_new for row in rows)
        for place in range(num_streamed, front):
            texts = ((row.new_ids, row.pad_token_id) for row in rows)
            column = [ids[place] if place < len(ids) else pad for ids, pad in texts]
            streamer.put(torch.tensor(column, device="cpu"))
        num_streamed = front
        if not running:  # A row that held its rows would never be freed.
            for row in rows:
                row.on_token = _no_listener

    for row in rows:
        row.on_token = put_columns

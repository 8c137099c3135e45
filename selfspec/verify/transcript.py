"""What has been committed: the ids of every row, when each one stops, and what a streamer gets.

Rows either grow one by one (`commit`) or all together (`commit_all`), the latter exactly as
stock's loop does. Knows nothing of trees or models; criteria and streamers are callables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from selfspec.machine.device import upload

__all__ = ["RowStops", "Streamer", "Transcript"]


class Streamer(Protocol):
    """transformers' streamer protocol."""

    def put(self, value: torch.Tensor) -> None:
        """Takes one token of each row."""
        ...

    def end(self) -> None:
        """Nothing more will come."""
        ...


class RowStops(NamedTuple):
    """Stopping rules that look at one row alone."""

    max_length: int
    eos_ids: frozenset[int] = frozenset()
    criteria: Sequence[Callable[[torch.Tensor, Any], torch.Tensor]] = ()

    def hit(self, token: int, length: int, ids: Callable[[], torch.Tensor]) -> bool:
        """Does a row of this many tokens end with `token`? Asks for its `ids` (1, L) if need be."""
        if token in self.eos_ids or length >= self.max_length:
            return True
        return any(bool(criterion(ids(), None).any()) for criterion in self.criteria)


class Transcript:
    """The growing output of a batch.

    What a row commits is kept as plain numbers, and written to its tensor once somebody reads that:
    a device is neither written to nor waited for at each token.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,  # (B, L)
        *,
        pad_token_id: int | None,
        max_length: int,
        pads_done_rows: bool = False,
        streamer: Streamer | None = None,
        room: int = 256,
    ) -> None:
        num_rows, self.prompt_length = input_ids.shape
        # As in stock's output, whatever integers the prompt is made of.
        self._ids = input_ids.new_empty(num_rows, self.prompt_length + room, dtype=torch.long)
        self._ids[:, : self.prompt_length] = input_ids
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self._pads_done_rows = pads_done_rows
        self._max_length = max_length
        self._streamer = streamer
        self._num_streamed = self.prompt_length
        self._committed: list[list[int]] = [[] for _ in range(num_rows)]
        self._num_written = [0] * num_rows
        self.lengths = [self.prompt_length] * num_rows
        self.done = [False] * num_rows

    @property
    def all_done(self) -> bool:
        """Has every row stopped?"""
        return all(self.done)

    @property
    def device(self) -> torch.device:
        """Where stock chooses tokens."""
        return self._ids.device

    def prefix(self, row: int) -> torch.Tensor:
        """(1, L): what a row reads so far."""
        self._write_down(row)
        return self._ids[row : row + 1, : self.lengths[row]]

    def prefixes(self) -> torch.Tensor:
        """(B, L): all rows, where they move together, in memory as those of stock."""
        return self._ids[:, : self.lengths[0]].contiguous()

    def num_new(self, row: int) -> int:
        """Tokens committed to a row."""
        return self.lengths[row] - self.prompt_length

    def is_padded(self, row: int) -> bool:
        """Does a row get nothing but pads from now on, because it stopped before the others?"""
        return self._pads_done_rows and self.done[row]

    def max_depth(self, row: int) -> int:
        """How many drafts can still be committed to a row with a token of the model's behind them.

        Beyond stand positions that stock never reads, and that a model may not have.
        """
        return max(self._max_length - self.lengths[row] - 1, 0)

    def commit(self, row: int, token: int, stops: RowStops) -> bool:
        """Appends to one row alone; True where the row stops with this token."""
        self._committed[row].append(token)
        self.lengths[row] += 1
        self.done[row] = stops.hit(token, self.lengths[row], partial(self.prefix, row))
        self._stream()
        return self.done[row]

    def commit_all(
        self, tokens: torch.Tensor, criteria: Callable[..., torch.Tensor], scores: Any
    ) -> list[int]:
        """Appends `tokens` (B,) to all rows at once and asks stock's criteria, in stock's order.

        Returns what was appended: rows that are padded got the pad token instead.
        """
        if self._pads_done_rows:
            done = torch.tensor(self.done, device=tokens.device)
            tokens = tokens.masked_fill(done, self.pad_token_id)
        length = self.lengths[0] + 1
        self._reserve(length)
        self._ids[:, length - 1] = tokens
        self.lengths = [length] * len(self.lengths)
        stopped = criteria(self.prefixes(), scores).tolist()
        self.done = [was or now for was, now in zip(self.done, stopped, strict=True)]
        ids: list[int] = tokens.tolist()
        if self._streamer is not None:
            self._streamer.put(torch.tensor(ids, device="cpu"))
        return ids

    def sequences(self) -> torch.Tensor:
        """(B, L): the output, rows that stopped early filled up with the pad token."""
        length = max(self.lengths)
        self._reserve(length)
        for row, own_length in enumerate(self.lengths):
            self._write_down(row)
            if own_length < length:
                self._ids[row, own_length:length] = self.pad_token_id
        return self._ids[:, :length].clone()

    def end(self) -> None:
        """Tells the streamer that nothing more will come."""
        if self._streamer is not None:
            self._streamer.end()

    def _write_down(self, row: int) -> None:
        """Brings the tensor up to what was committed to a row."""
        waiting = self._committed[row][self._num_written[row] :]
        if waiting:
            end = self.lengths[row]
            self._reserve(end)
            many = len(waiting) > 1  # A single number can be written without a tensor.
            self._ids[row, end - len(waiting) : end] = (
                upload(torch.tensor(waiting, device="cpu"), self._ids.device)
                if many
                else waiting[0]
            )
            self._num_written[row] += len(waiting)

    def _reserve(self, length: int) -> None:
        if length > self._ids.shape[1]:
            wider = self._ids.new_empty(len(self.lengths), 2 * length)
            wider[:, : self._ids.shape[1]] = self._ids
            self._ids = wider

    def _stream(self) -> None:
        """Puts the columns that every row has reached, each token once and in order."""
        if self._streamer is None:
            return
        while any(length > self._num_streamed for length in self.lengths) and all(
            done or length > self._num_streamed
            for done, length in zip(self.done, self.lengths, strict=True)
        ):
            index = self._num_streamed - self.prompt_length
            rows = self._committed
            column = [ids[index] if index < len(ids) else self.pad_token_id for ids in rows]
            self._streamer.put(torch.tensor(column, device="cpu"))
            self._num_streamed += 1

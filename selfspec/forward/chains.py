"""Chains on the stock cache, and copies of running states for when drafts turn out wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from selfspec.attention import grouped_attention
from selfspec.compat.branching import state_functions
from selfspec.compat.generation import belongs_to_caller, kv_of_decoder, update_arguments
from selfspec.compat.states import (
    columns_of,
    crop_to,
    record_past,
    states_of,
    stop_recording_past,
    windows_of,
)
from selfspec.forward.columns import TextKV, text_kv_in
from selfspec.forward.eager import eager
from selfspec.forward.inputs import plain_inputs
from selfspec.forward.model import Forwarded, forwarded, takes
from selfspec.forward.prompt import Prefilled
from selfspec.forward.states.seam import in_one_chunk
from selfspec.machine.device import upload
from selfspec.records import DraftTree


class ChainBackend:
    """Chains on the stock cache, for models whose forward can't take a tree.

    All rows advance by the same number of tokens. The model's own `generate` code prepares the
    inputs, so they are what its plain steps would get.

    Wrong drafts are cropped. Running states can't be, so they are copied before a forward over
    drafts. If one of these was wrong, the cache goes back to the copies, and the tokens that were
    accepted are pending: the next forward reads them again, in front of its own.
    """

    setting_up = 0.0
    chains_only = True
    kv = None
    shows_states = True

    def __init__(
        self, model: Any, *, kind: Callable[[], str] = eager, reason: str | None = None
    ) -> None:
        self.reason = reason
        self._kind = kind
        self._model = model
        self._takes_number = takes(model, "logits_to_keep")
        self._functions = state_functions(model)
        self._num_new = 0  # The tokens that were committed since the prompt.
        self._width = 0  # The columns of the last chains that are after the committed ones.
        self._num_pending = 0
        self._cache: Any = None
        self._states: KeptStates | None = None

    def admit(
        self,
        prompt: Prefilled,
        rows: Sequence[object] = (),
        others: Sequence[object] = (),
        *,
        max_new_columns: int = 0,
        max_tree: int = 0,
    ) -> None:
        """Takes in a prompt that was read, with the arguments of the step that reads the roots."""
        self._ids, self._kwargs = prompt.input_ids, prompt.model_kwargs
        self._cache = kv_of_decoder(prompt.cache)  # What an encoder has read stays as it is.
        self._num_given = self._ids.shape[1]
        self._first_front = columns_of(self._cache) or self._num_given
        self._states = None if self._cache.is_croppable else KeptStates(self._cache)
        # An interrupt may break off any forward over a cache that somebody else has.
        self._keeps_always = belongs_to_caller(prompt.cache)
        record_past(self._cache)

    @property
    def kind(self) -> str:
        return self._kind()

    @property
    def front(self) -> int:
        return self._first_front + self._num_new

    @property
    def num_pending(self) -> int | None:
        return None if self._states is None else self._num_pending

    def max_width(self, max_nodes: int) -> int:
        """All nodes asked for, less what is read again: a token is where it will be in the text."""
        return max(max_nodes - self._num_pending, 1)

    def lay_out(self, rows: Sequence[object], trees: Sequence[DraftTree]) -> dict[str, Any]:
        """The model's own inputs for the chains; shorter ones are padded with their last token."""
        chains_ids = [tree.tokens for tree in trees]
        self._width = max(map(len, chains_ids))
        padded = [ids + ids[-1:] * (self._width - len(ids)) for ids in chains_ids]
        chains = upload(torch.tensor(padded, device="cpu"), self._ids.device)
        self._ids = torch.cat([self._ids, chains], dim=-1)
        if self._states is not None and (self._width > 1 or self._keeps_always):
            self._states.keep()
        return self._inputs(self._num_pending + self._width)

    def forward(self, layout: Any, *, with_states: bool = False) -> Forwarded:
        if self._takes_number:
            layout["logits_to_keep"] = self._width

        def run() -> torch.Tensor:
            num_tokens = self._num_pending + self._width
            with grouped_attention(), in_one_chunk(num_tokens, self._functions):
                output = self._model(**layout, return_dict=True)
            return output.logits[:, -self._width :]  # type: ignore[no-any-return]

        return forwarded(self._model, run, with_states=with_states)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the same number of tokens of every row and takes the rest back."""
        num_kept = len(paths[0])
        self._num_new, self._width = self._num_new + num_kept, self._width - num_kept
        if self._states is not None:
            self._num_pending = self._num_pending + num_kept if self._width else 0
        self._take_back()

    def num_columns(self, row: object) -> int:
        """How many columns of the one row are there, all committed."""
        return self.front - self._num_pending

    def text_kv(self, row: object) -> TextKV:
        return text_kv_in(self._cache)

    def wipe(self, rows: Sequence[int]) -> None:
        """Does nothing: what drafts have left was cropped, and the states were put back."""

    def release(self, *, fills: bool = True) -> None:
        """Takes back what an error has left, and lets windowed layers drop old columns again.

        What is pending is read first if anybody gets the cache.
        """
        if self._cache is None:
            return
        self._take_back()
        if fills and self._states is not None and self._num_pending:
            self._states.keep()
            self._width = 1  # If this breaks off, it is taken back.
            try:
                self.forward(self._inputs(self._num_pending))
                self._num_pending = self._width = 0
            finally:
                self._take_back()
        stop_recording_past(self._cache)

    def _take_back(self) -> None:
        """Lets the cache hold what is committed and not pending, and the ids all committed ones."""
        self._ids = self._ids[:, : self._num_given + self._num_new]
        if self._states is not None:
            self._states.go_back() if self._width else self._states.forget()
        crop_to(self._cache, self.front - self._num_pending, self._width)

    def _inputs(self, num_tokens: int) -> dict[str, Any]:
        """The model's own inputs for the last tokens of the ids, with masks and positions."""
        # The arguments are those of a step that reads the first root.
        num_more = self._ids.shape[1] - self._num_given - 1
        arguments = update_arguments(self._model, dict(self._kwargs), num_new_tokens=num_more)
        return plain_inputs(self._model, self._ids, arguments, num_tokens)


class KeptStates:
    """The states of a KV cache that has read a prompt, as they were before a forward.

    A state can't be cropped, and a forward writes over it. The copies are made once, and change
    places with the states that are given up.
    """

    def __init__(self, kv: Any) -> None:
        self._places = states_of(kv)
        with torch.inference_mode(False):  # Later calls may write to them outside of it.
            self._copies = [torch.empty_like(held[key]) for held, key in self._places]
        self._windows = windows_of(kv)
        self._past: list[Any] = []
        self._num_kept = 0  # How many states the copies still stand for.

    def keep(self) -> None:
        """Copies what the next forward will change."""
        for (held, key), copy in zip(self._places, self._copies, strict=True):
            copy.copy_(held[key])
        self._past = [held[key] for held, key in self._windows]
        self._num_kept = len(self._places)

    def go_back(self) -> None:
        """Puts back what was kept, if it was neither put back nor forgotten since.

        An interrupt may break this off: the next call puts back the rest, and no state twice.
        """
        if self._num_kept:
            for (held, key), past in zip(self._windows, self._past, strict=True):
                held[key] = past
        for index in range(self._num_kept)[::-1]:
            held, key = self._places[index]
            held[key], self._copies[index] = self._copies[index], held[key]
            self._num_kept = index
        self.forget()

    def forget(self) -> None:
        """Lets the states be as the last forward has left them."""
        self._past, self._num_kept = [], 0

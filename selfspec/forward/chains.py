"""Chains on transformers' cache, for models whose attention can't take a tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from selfspec.attention import grouped_attention
from selfspec.compat.generation import kv_of_decoder, update_arguments
from selfspec.compat.states import columns_of, crop_to, record_past, stop_recording_past
from selfspec.forward.columns import KVRow, TextKV, text_kv_in
from selfspec.forward.inputs import plain_inputs
from selfspec.forward.layers import take_over
from selfspec.forward.model import EagerForwards, Logits, takes
from selfspec.forward.prompt import Prefilled
from selfspec.forward.states.rules import Ancestry
from selfspec.forward.states.slots import States
from selfspec.forward.states.swapped_functions import Function, branching
from selfspec.machine.device import upload
from selfspec.records import DraftTree
from selfspec.weights.rounded import products_of_a_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ChainBackend:
    """Chains on transformers' cache, for models whose forward can't take a tree.

    All rows advance by the same number of tokens. The model's own `generate` code prepares the
    inputs, so they are what its plain steps would get.

    Wrong drafts are cropped. Running states, if the model has any, follow the accepted tokens as
    those of trees do: a chain is a tree without branches.
    """

    setting_up = 0.0
    chains_only = True
    shows_states = True
    num_columns = column_bytes = 0  # Rows have no slots.

    def __init__(
        self,
        model: PreTrainedModel,
        eager: EagerForwards = EagerForwards(),  # noqa: B008 has no state
        functions: Sequence[Function] = (),
    ) -> None:
        """`functions` move the running states of its layers on."""
        self.forward_name, self.reason, self.packing_note = eager
        self._model = model
        self._takes_number = takes(model, "logits_to_keep")
        self._functions = functions
        self._num_new = 0  # The tokens that were committed since the prompt.
        self._is_open = False  # Was a forward laid out whose path is not known yet?
        self._cache: Any = None
        self._states = States()
        self._rows: Sequence[KVRow] = ()

    @property
    def kv(self) -> ChainBackend:
        """Stands where trees have a `TreeKV`; keys and values are in transformers' cache."""
        return self

    def admit(
        self, prompt: Prefilled, rows: Sequence[KVRow] = (), *_: object, **__: object
    ) -> None:
        """Takes in a prompt that was read, with the arguments of the step that reads the roots.

        Its rows are all of the batch, and its cache grows by itself.
        """
        self._ids, self._kwargs, self._rows = prompt.input_ids, prompt.model_kwargs, rows
        self._cache = kv_of_decoder(prompt.cache)  # What an encoder has read stays as it is.
        self._prompt_length = self._ids.shape[1]
        self._first_start = columns_of(self._cache) or self._prompt_length
        record_past(self._cache)
        take_over(self._cache.layers, self._states)

    @property
    def tree_start(self) -> int:
        return self._first_start + self._num_new

    def max_width(self, max_nodes: int) -> int:
        """All nodes: a token is where it will be in the text."""
        return max_nodes

    def lay_out(self, rows: Sequence[object], trees: Sequence[DraftTree]) -> Logits:
        """The next forward, with the model's own inputs for the chains.

        Shorter ones are padded with their last token.
        """
        if self._is_open:  # The last forward broke off, and its first layers have added columns.
            self._crop()
        self._is_open = True
        chains = [tree.tokens for tree in trees]
        width = max(map(len, chains))
        padded = [ids + ids[-1:] * (width - len(ids)) for ids in chains]
        new_ids = upload(torch.tensor(padded, device="cpu"), self._ids.device)
        committed = self._ids[:, : self._prompt_length + self._num_new]
        self._ids = torch.cat([committed, new_ids], dim=-1)
        # The arguments are those of a step that reads the first root.
        num_more = self._ids.shape[1] - self._prompt_length - 1
        arguments = update_arguments(self._model, dict(self._kwargs), num_new_tokens=num_more)
        inputs = plain_inputs(self._model, self._ids, arguments, width)
        if self._takes_number:
            inputs["logits_to_keep"] = width
        return partial(self._logits, inputs, width)

    def _logits(self, inputs: dict[str, Any], width: int) -> torch.Tensor:
        ancestry = Ancestry.of_chains(len(self._ids), width, self._ids.device)
        branches = branching(self._states, ancestry, self._functions)
        with grouped_attention(), products_of_a_step(), branches:
            output = self._model(**inputs, return_dict=True)
        return output.logits[:, -width:]  # type: ignore[no-any-return]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the same number of tokens of every row and takes the rest back."""
        self._states.follow(0, paths)
        self._num_new += len(paths[0])
        for row in self._rows:
            row.num_columns = self.tree_start
        self._crop()

    def _crop(self) -> None:
        """Takes back what was not committed."""
        crop_to(self._cache, self.tree_start)
        self._is_open = False

    def keep_rows(self, rows: Sequence[object]) -> None:
        """Does nothing: rows of chains come and go together."""

    def text_kv(self, row: object) -> TextKV:
        return text_kv_in(self._cache)

    def wipe(self, rows: Sequence[int]) -> None:
        """Does nothing: what drafts have left was cropped, and states have read no draft."""

    def release(self, *, fills: bool = True) -> None:
        """Lets windowed layers drop old columns again, and gives them their states."""
        if self._cache is not None:
            self._crop()
            self._states.hand_back(self._cache.layers)
            stop_recording_past(self._cache)
            if self._states.is_torn:  # Nobody may go on with these: without layers it is an error.
                self._cache.layers.clear()

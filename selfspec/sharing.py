"""What the prompts of an engine share with texts that were read before, or are being written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from selfspec.ability.families import changes_other_rows
from selfspec.compat.generation import belongs_to_caller
from selfspec.compat.kernels import is_out_of_memory
from selfspec.compat.states import has_states
from selfspec.forward.backends import Backend
from selfspec.forward.columns import layers_reason, text_kv_in
from selfspec.forward.prompt import Prefilled, ReadSoFar
from selfspec.kept_kv import KeptText, PrefixStore, PromptLogits
from selfspec.prompt import Prompt
from selfspec.row import ReaderGone, Row


class PrefixReuse:
    """The store of an engine, or why it has none; with neither, nothing is shared."""

    def __init__(self, kept_kv: PrefixStore | str | None, backend: Backend) -> None:
        self._store = kept_kv if isinstance(kept_kv, PrefixStore) else None
        self._reason = kept_kv if isinstance(kept_kv, str) else None
        self._backend = backend

    def begin(self, prompt: Prompt, rows: Sequence[Row]) -> None:
        """Lets a prompt go on after the longest beginning that was read, also for one of `rows`."""
        stats, plan = prompt.stats, prompt.plan
        stats.kept_reason = self._reason or (self._reason_of(prompt) if self._store else None)
        if self._store is None or stats.kept_reason is not None:
            return
        ids = np.array(plan.input_ids[0].tolist())
        running = [self._text_of(row) for row in rows if row.prompt_logits is not None]
        try:
            prefix = self._store.beginning(ids, _scope(prompt), plan.cache, running)
        except Exception as error:
            if not self.free_store(error):
                raise
            prefix = None
        if prefix is not None:  # Else the prompt is read whole.
            prompt.result.read = ReadSoFar.of_prefix(plan, prefix)

    def joined(self, prompt: Prompt, prefilled: Prefilled) -> None:
        """A prompt was read, which others may share from now on, if it has one row.

        Of several, each may leave before the prompt has ended.
        """
        has_one_row = len(prompt.result.rows) == 1
        if self._store is None or prompt.stats.kept_reason is not None or not has_one_row:
            return
        (row,) = prompt.result.rows
        row.prompt_logits = PromptLogits(len(row.prompt_ids), prefilled.logits, _scope(prompt))
        if (kv := text_kv_in(prefilled.cache)).states:  # Soon they are those of a longer text.
            self._store.keep(np.array(row.prompt_ids), row.prompt_logits, kv)

    def ended(self, prompts: Sequence[Prompt]) -> None:
        """Keeps what was read of these prompts, whose rows are still there, but after an error.

        A reader who has gone may come back.
        """
        for row in (row for prompt in prompts for row in prompt.result.rows):
            is_whole = row.error is None or isinstance(row.error, ReaderGone)
            if self._store is not None and row.prompt_logits is not None and is_whole:
                text = self._text_of(row)
                self._store.keep(text.ids, text.end, text.kv)

    def left(self, prompt: Prompt) -> None:
        """Keeps the part of a prompt that was read, whose text nobody wants any more."""
        if self._store is None or prompt.stats.kept_reason is not None:
            return
        if num_read := prompt.result.read.num_columns:
            ids = np.array(prompt.input_ids[0, :num_read].tolist())
            end = PromptLogits(num_read, None, _scope(prompt))
            self._store.keep(ids, end, text_kv_in(prompt.plan.cache))

    def limit_to(self, num_bytes: int) -> None:
        """Lets what is kept of texts that have ended take this much memory at most."""
        if self._store is not None:
            self._store.limit_to(num_bytes)

    def free_store(self, error: Exception) -> bool:
        """Drops what is kept of texts that have ended, if memory has run out; was there any?"""
        if self._store is None or not is_out_of_memory(error):
            return False
        return self._store.drop() > 0

    def _reason_of(self, prompt: Prompt) -> str | None:
        """Why what was read for other texts is of no use for a prompt; None if it is.

        Then each column of its KV depends on the ids up to there, and on nothing else.
        """
        plan, config = prompt.plan, prompt.model.config
        if prompt.config.learning == "request" and prompt.scope is None:
            return "learning='request' lets no prompt go on after one of another request"
        if changes_other_rows(config, prompt.model_kwargs):
            return "it is so long that its rotary embedding has changed"
        if config.is_encoder_decoder:
            return "an encoder reads its prompt"
        if plan.is_read_at_once:
            return "its prompt is read in one part, as one with images, or in chunks of its own"
        if plan.on_logits is not None:
            return "the logits of its whole prompt are asked for"
        if belongs_to_caller(plan.cache):
            return "its KV cache may be the caller's"
        mask, positions = (plan.arguments.get(name) for name in ("attention_mask", "position_ids"))
        counted = torch.arange(plan.num_tokens, device=plan.input_ids.device)
        has_mask = mask is not None and (mask.dim() != 2 or not mask.all())
        is_counted = positions is None or torch.equal(positions, counted.expand_as(positions))
        if len(plan.input_ids) > 1 or has_mask or not is_counted:
            return "its prompt has several rows, padding, or a mask or positions of its own"
        num_layers = config.get_text_config(decoder=True).num_hidden_layers
        if reason := layers_reason(plan.cache, num_layers):
            return reason
        if self._backend.chains_only and not any(map(has_states, plan.cache.layers)):
            return "its model verifies chains alone, which say nothing of prompts in two parts"
        return None

    def _text_of(self, row: Row) -> KeptText:
        """The tokens of a row whose keys and values are there, and these."""
        ids = np.array((row.prompt_ids + row.new_ids)[: row.num_columns])
        return KeptText(ids, row.prompt_logits, self._backend.kv.text_kv(row))


def _scope(prompt: Prompt) -> object:
    return prompt.scope if prompt.config.learning == "request" else None

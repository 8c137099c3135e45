"""Reads a prompt, whole or in parts, into the KV cache on which drafts go on.

transformers asks the model only for the logits of the last token, and so do we. A hook keeps the
hidden states that enter the output head, so that the head can be run again over the last of them.
The logits of the whole prompt are never held at once, and the first token is chosen from exactly
the logits that transformers would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import (
    belongs_to_caller,
    kv_of,
    mask_of_text,
    read_prompt,
    update_arguments,
)
from selfspec.compat.states import columns_of
from selfspec.forward.columns import Beginning, fill, layers_reason
from selfspec.forward.inputs import only_followed, other_inputs, plain_inputs
from selfspec.forward.model import at_output_head

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Where the logits of a whole prompt are asked for, it is read in parts of 128 tokens.
_PART_OF_LOGITS = 128
OnLogits = Callable[[int, torch.Tensor], None]  # The number of the first token; (B, L, V).


def plain_positions(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # (B, P)
    arguments: dict[str, Any],  # those of the step that reads the token after these
) -> torch.Tensor | None:
    """The position ids that the model's own code gives the plain step after a prompt, if any.

    A model may shift the positions in its arguments.
    """
    # Any token will do as the next one, since positions do not depend on it.
    return plain_inputs(model, pad(input_ids, (0, 1)), arguments).get("position_ids")


def placing_reason(positions: torch.Tensor | None, arguments: dict[str, Any]) -> str | None:
    """Why the nodes of a tree can't be given the positions of plain steps; None if they can."""
    if positions is not None:
        is_whole = not positions.is_floating_point() or bool((positions == positions.long()).all())
        return None if is_whole else "the positions of its plain steps are no whole numbers"
    mask = arguments.get("attention_mask")
    if mask is not None and not mask.all():
        return "its plain steps are given no positions, and some columns are padding"
    if other_inputs(arguments):
        return "its plain steps are given no positions, and not all columns may be text"
    return None


def next_positions(
    model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    """(..., B, 1): the position ids of the rows' next tokens; columns, where none are given."""
    positions = plain_positions(model, input_ids, arguments)
    if positions is None:
        positions = input_ids.new_full((1, 1), columns_of(kv_of(arguments)))
    # Of several, the last one: Phi-3 reads all again where its rotary factors change.
    positions = positions.long()[..., -1:]
    return positions.expand(*positions.shape[:-2], len(input_ids), 1)


@dataclass(frozen=True)
class Prefilled:
    """A prompt that the model has read, with all that the first step needs."""

    input_ids: torch.Tensor  # (B, P)
    model_kwargs: dict[str, Any]  # those of the first step
    logits: torch.Tensor  # (B, V): those of the last token
    hidden: torch.Tensor | None = None  # (B, N, D): what entered the output head at the end

    @property
    def cache(self) -> Any:
        return kv_of(self.model_kwargs)

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """(B, P): which columns count; None where all do."""
        mask = mask_of_text(self.model_kwargs)
        # Older versions of transformers keep a mask that hides nothing.
        return None if mask is None or mask.all() else mask[:, :-1].bool()

    @cached_property
    def texts(self) -> list[list[int]]:
        """Each row's tokens, without padding."""
        if self.visible is None or not self.input_ids.shape[1]:
            return self.input_ids.tolist()
        pairs = zip(self.input_ids, self.visible, strict=True)
        return [ids[seen[-len(ids) :]].tolist() for ids, seen in pairs]

    def repeated(self, number: int) -> Prefilled:
        """The same for a number of copies of every row; its cache gets them too."""
        self.cache.batch_repeat_interleave(number)

        def copies(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return value.repeat_interleave(number, dim=0) if is_tensor else value

        kwargs = {name: copies(value) for name, value in self.model_kwargs.items()}
        return Prefilled(copies(self.input_ids), kwargs, copies(self.logits), copies(self.hidden))


class PromptReader:
    """The prompt of one call while it is read.

    It goes through the model as with transformers, whose own code splits what it splits. The parts
    of a longer one go through it as with transformers' `prefill_chunk_size`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,  # (B, P)
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
        *,
        num_copies: int = 1,  # So many rows side by side are alike, of which one is read.
        learns: bool,
        on_logits: OnLogits | None = None,  # Gets the logits of all tokens, part by part.
        in_parts: bool = True,  # May the model read it so?
    ) -> None:
        self.input_ids = input_ids[::num_copies]
        self.arguments = {  # What the model is given beside the ids.
            name: value[::num_copies]
            if num_copies > 1 and isinstance(value, torch.Tensor)
            else value
            for name, value in model_kwargs.items()
        }
        self._num_copies = num_copies
        self.num_read = 0  # How many columns were read, here or for another text.
        self.num_kept = 0  # How many of them for another text.
        self.hidden: torch.Tensor | None = None  # (B, N, D): what entered the head at the end
        self._model = model
        self._config = generation_config
        self._on_logits = on_logits
        self._in_parts = in_parts
        self._logits: torch.Tensor | None = None  # (1, V): those after a prompt that was read.
        self._keeps_states = learns and model.get_output_embeddings() is not None
        self._num_states = 0

    @property
    def num_left(self) -> int:
        """How many columns are still to be read."""
        known = self.num_read or columns_of(self.cache) or 0
        return max(int(self.input_ids.shape[1]) - known, 0)

    @property
    def cache(self) -> Any:
        return kv_of(self.arguments)

    def sharing_reason(self) -> str | None:
        """Why what was read for another text is of no use for it; None if it is.

        Then each column of its KV depends on the ids up to there, and on nothing else.
        """
        if self._model.config.is_encoder_decoder:
            return "an encoder reads its prompt"
        if self._has_one_part:
            return "its prompt is read in one part, as one with images, or in chunks of its own"
        if self._on_logits is not None:
            return "the logits of its whole prompt are asked for"
        if belongs_to_caller(self.cache):
            return "its KV cache may be the caller's"
        mask, positions = (self.arguments.get(name) for name in ("attention_mask", "position_ids"))
        counted = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        has_mask = mask is not None and (mask.dim() != 2 or not mask.all())
        is_counted = positions is None or torch.equal(positions, counted.expand_as(positions))
        if len(self.input_ids) > 1 or has_mask or not is_counted:
            return "its prompt has several rows, padding, or a mask or positions of its own"
        config = self._model.config.get_text_config(decoder=True)
        return layers_reason(self.cache, config.num_hidden_layers)

    def begin(self, beginning: Beginning) -> None:
        """Goes on after what was read for another text."""
        fill(self.cache, beginning)
        self.num_read = self.num_kept = beginning.num_columns
        self._logits = beginning.logits

    def begin_anew(self) -> bool:
        """Forgets what was read, after a part that broke off; does nothing where others have it.

        That is a caller with its cache, or whoever has got logits.
        """
        cache = self.cache
        is_ours = type(cache) is DynamicCache and not belongs_to_caller(cache)
        if not is_ours or cache.offloading or self._on_logits is not None:
            return False
        empty = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        vars(cache).clear()  # The cache itself, since others have it too.
        vars(cache).update(vars(empty))
        self.num_read, self.num_kept, self._logits, self.hidden = 0, 0, None, None
        return True

    def read(self, num_tokens: int | None = None, *, num_states: int = 0) -> Prefilled | None:
        """Reads `num_tokens` more, or all that is left; returns the prompt at its end.

        Images and the like have their places in the whole prompt, which is then read in one part.
        `num_states` of the last hidden states are kept, if anybody may learn from them.
        """
        self._num_states = max(self._num_states, num_states)
        length = int(self.input_ids.shape[1])
        is_whole = num_tokens is None or self._has_one_part
        end = length if is_whole else min(self.num_read + (num_tokens or 0), length)
        kwargs = dict(self.arguments)
        step = _PART_OF_LOGITS if self._on_logits is not None and not self._has_one_part else end
        logits, outputs = self._logits, None
        while logits is None:
            outputs = self._read_until(min(self.num_read + step, end), kwargs)
            if self.num_read == end:
                logits = outputs.logits[:, -1].clone()  # A view would keep the whole prompt's.
        if end < length:
            return None
        kwargs = update_arguments(self._model, kwargs, outputs=outputs)
        if not self._model.config.is_encoder_decoder:  # Its chains get all that plain steps get.
            kwargs = only_followed(kwargs)
        hidden, self.hidden = self.hidden, None  # They go once the prompt is learned.
        prefilled = Prefilled(self.input_ids, kwargs, logits, hidden)
        return prefilled if self._num_copies == 1 else prefilled.repeated(self._num_copies)

    def _read_until(self, end: int, kwargs: dict[str, Any]) -> Any:
        start = self.num_read
        keeps_states = self._keeps_states and self._num_states
        with self.keeping_states(kwargs) if keeps_states else nullcontext(kwargs) as arguments:
            if end - start < self.input_ids.shape[1]:
                arguments = self._of_part(start, end, arguments)
            if self._on_logits is not None and "logits_to_keep" in arguments:
                arguments = {**arguments, "logits_to_keep": 0}
            ids = self.input_ids[:, start:end]
            outputs = read_prompt(self._model, ids, self._config, dict(arguments))
        if self._on_logits is not None:
            self._on_logits(start, outputs.logits)
        self.num_read = end
        return outputs

    @property
    def _has_one_part(self) -> bool:
        embeds, chunk = self.arguments.get("inputs_embeds"), self._config.prefill_chunk_size
        is_known = embeds is None and chunk is None and not other_inputs(self.arguments)
        return not (is_known and self._in_parts)

    def _of_part(self, start: int, end: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments for some columns of the prompt, with those in front of them in its KV."""
        num_known = columns_of(kv_of(kwargs)) or self.num_read  # States count no columns.
        until = num_known + end - start
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs = {**kwargs, "attention_mask": mask[:, :until]}
        if (positions := kwargs.get("position_ids")) is not None:
            kwargs = {**kwargs, "position_ids": positions[..., num_known:until]}
        return kwargs

    @contextmanager
    def keeping_states(self, model_kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the arguments for the prompt's forward; keeps what enters the output head."""
        if not self._num_states or model_kwargs.get("logits_to_keep") != 1:
            yield model_kwargs
            return

        def keep_last(hidden: torch.Tensor) -> torch.Tensor:
            number = self._num_states
            earlier = [] if self.hidden is None else [self.hidden]
            # A copy, since a view would keep the whole prompt's.
            self.hidden = torch.cat([*earlier, hidden[:, -number:]], dim=1)[:, -number:]
            return hidden if self._on_logits is not None else hidden[:, -1:]

        with at_output_head(self._model, keep_last):
            yield {**model_kwargs, "logits_to_keep": 0}

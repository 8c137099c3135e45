"""Reads a prompt, whole or in parts, and teaches what the model said in it.

Stock asks the model only for the logits of the last token, and so do we. A hook keeps the hidden
states that enter the output head, and the head is run again over the last of them in chunks. So the
logits of the whole prompt are never held at once, and the first token is chosen from exactly the
logits that stock would have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from selfspec.compat.generation import kv_of, length_of_dropped_mask, update_arguments
from selfspec.compat.states import columns_of, keeps_only_states
from selfspec.draft.learned import Learned
from selfspec.engine import top_k_of
from selfspec.plugin.call import Call
from selfspec.run.prepared import Prepared
from selfspec.run.prompt import Prompt

_CHUNK_ELEMENTS = 1 << 22  # The most logits that are held at a time.
# The LUTs learn from the last tokens of each row. More tokens bring very little, and the head has
# to be run for each of them, which is slow on a CPU.
_NUM_TEACHING = {"cpu": 16, "other": 64}


class PromptReader:
    """The prompt of one call that is being read.

    Read in one part, it goes through the model as it does with stock. The parts of a longer one go
    through it as with stock's `prefill_chunk_size`.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self._num_read = 0
        learns = call.config.learning != "frozen"
        self._head: Any = call.model.get_output_embeddings() if learns else None
        self.hidden: torch.Tensor | None = None  # (B, N, D): what entered it for the last tokens

    @property
    def num_left(self) -> int:
        """How many tokens are still to be read."""
        return self.call.num_tokens - self._num_read

    def read(self, prepared: Prepared, num_tokens: int | None = None) -> Prompt | None:
        """Reads on, `num_tokens` or all of it; returns the prompt once its end was read."""
        call, start = self.call, perf_counter()
        num_rows, length = call.input_ids.shape
        end = length if num_tokens is None else min(self._num_read + num_tokens, length)
        num_known = self._num_read or columns_of(kv_of(call.model_kwargs))
        prepared.before_prompt(num_rows * max(end - num_known, 1))
        read_from = perf_counter()
        call.stats.seconds["prepare"] += read_from - start  # type: ignore[assignment]
        kwargs = dict(call.model_kwargs)
        with self.listening(kwargs) as asked:
            is_whole = end - self._num_read == length
            outputs = self._whole(asked) if is_whole else self._part(self._num_read, end, asked)
        self._num_read = end
        call.stats.seconds["prefill"] += perf_counter() - read_from  # type: ignore[assignment]
        if end < length:
            return None
        kwargs = update_arguments(call.model, kwargs, outputs=outputs)
        logits = outputs.logits[:, -1].clone()  # A view would keep the whole prompt's.
        return Prompt(call.input_ids, kwargs, logits, self.hidden)

    def _whole(self, kwargs: dict[str, Any]) -> Any:
        """The model over all that its KV cache does not hold, in the chunks that stock would take.

        With a cache of the caller's, the ids are the whole text or only its end; the length of the
        attention mask tells.
        """
        call, num_unread = self.call, self._num_unread(kwargs)
        chunk = call.generation_config.prefill_chunk_size
        if chunk is None:
            inputs = call.model.prepare_inputs_for_generation(
                call.input_ids,
                next_sequence_length=num_unread,
                is_first_iteration=True,
                **kwargs,
            )
            return call.model(**inputs, return_dict=True)
        length = call.input_ids.shape[1]
        for start in range(length - (num_unread or length), length, chunk):
            outputs = self._part(start, min(start + chunk, length), kwargs)
        return outputs

    def _num_unread(self, kwargs: dict[str, Any]) -> int | None:
        if keeps_only_states(kv_of(kwargs)):
            return None  # Stock does not ask where it stands.
        num_known = int(kv_of(kwargs).get_seq_length())
        if (embeds := kwargs.get("inputs_embeds")) is not None:
            return int(embeds.shape[1]) - num_known
        mask, length = kwargs.get("attention_mask"), int(self.call.input_ids.shape[1])
        dropped = length_of_dropped_mask(self.call.generation_config)
        return (
            length - num_known if length == (dropped if mask is None else mask.shape[1]) else None
        )

    def _part(self, start: int, end: int, kwargs: dict[str, Any]) -> Any:
        """The model over some columns of the prompt, with those in front of them in its KV."""
        model, kwargs = self.call.model, dict(kwargs)
        num_known = kv_of(kwargs).get_seq_length()
        until = num_known + end - start
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = mask[:, :until]
        if (positions := kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = positions[..., num_known:until]
        inputs = model.prepare_inputs_for_generation(
            self.call.input_ids[:, start:end], is_first_iteration=True, **kwargs
        )
        return model(**inputs, return_dict=True)

    @contextmanager
    def listening(self, model_kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the arguments for the prompt's forward; keeps what enters the output head inside.

        Only this thread's forwards count, since others may run the same model meanwhile.
        """
        if self._head is None or model_kwargs.get("logits_to_keep") != 1:
            yield model_kwargs
            return
        owner = threading.get_ident()

        def keep_last(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if threading.get_ident() != owner:
                return None
            hidden = args[0]
            number = _NUM_TEACHING.get(hidden.device.type, _NUM_TEACHING["other"])
            held = [] if self.hidden is None else [self.hidden]
            # A copy, since a view would keep the whole prompt's.
            self.hidden = torch.cat([*held, hidden[:, -number:]], dim=1)[:, -number:]
            return (hidden[:, -1:], *args[1:])

        handle = self._head.register_forward_pre_hook(keep_last)
        try:
            yield {**model_kwargs, "logits_to_keep": 0}
        finally:
            handle.remove()


def teach(memory: Learned, prompt: Prompt, head: Any, num_readable: int) -> None:
    """Shows the sources the model's likeliest tokens after the last tokens of a prompt.

    Ids from `num_readable` on, which the model can't read, are left out. If two tokens in a row
    occur several times, only the last occurrence is shown, since the sources would keep no other.
    """
    hidden, visible, ids = prompt.hidden, prompt.visible, prompt.input_ids
    length = 0 if hidden is None else min(hidden.shape[1], ids.shape[1])
    if hidden is None or length == 0:
        return
    # A model such as Cohere or Granite scales what its head puts out.
    raw = head(hidden[:, -1:])[:, 0].float()
    scale = float((raw * prompt.logits.float()).sum() / (raw * raw).sum().clamp(min=1e-12))
    pairs = last_pairs(ids.cpu(), None if visible is None else visible.cpu(), length)
    hidden = hidden[:, -length:].reshape(-1, hidden.shape[-1])
    # Where each pair came last, without those that end in padding.
    last = {(above, token): i for i, (above, token) in enumerate(pairs.tolist()) if token >= 0}
    indices = torch.tensor(sorted(last.values()), dtype=torch.long, device="cpu")
    for part in torch.split(indices, max(_CHUNK_ELEMENTS // prompt.logits.shape[-1], 1)):
        logits = head(hidden[part.to(hidden.device)])[:, :num_readable] * scale
        memory.observe_pairs(pairs[part].numpy(), top_k_of(logits, memory.top_k))


def last_pairs(input_ids: torch.Tensor, visible: torch.Tensor | None, length: int) -> torch.Tensor:
    """(B * length, 2): the last two tokens at each of the last columns; -1 stands for none."""
    ids = torch.nn.functional.pad(input_ids.long(), (1, 0), value=-1)
    if visible is not None:
        ids[:, 1:].masked_fill_(~visible[:, -input_ids.shape[1] :], -1)
    return torch.stack([ids[:, -length - 1 : -1], ids[:, -length:]], dim=-1).reshape(-1, 2)

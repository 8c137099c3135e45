"""Reads a prompt in parts, so that others need not wait until all of it was read."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from selfspec.plugin.call import Call, PromptRead
from selfspec.plugin.prompt import PromptTap
from selfspec.run.prepared import Prepared

__all__ = ["PromptReader"]


class PromptReader:
    """One prompt that is being read; serves a call with one row and a KV cache.

    A prompt that is read in one part is read exactly as `Call.read_prompt` does. The parts of a
    longer one go through the model as they do with stock's `prefill_chunk_size`.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tap = PromptTap(call.model, listens=call.config.learning != "frozen")
        self._num_read = 0

    @property
    def num_left(self) -> int:
        """How many tokens are still to be read."""
        return int(self._call.input_ids.shape[1]) - self._num_read

    def read(self, num_tokens: int, prepared: Prepared) -> PromptRead | None:
        """Reads on, at most so many tokens; returns what the end of the prompt leaves behind."""
        if num_tokens >= self.num_left and not self._num_read:
            self._num_read = int(self._call.input_ids.shape[1])
            return self._call.read_prompt(prepared)
        call = self._call
        prepared.before_prompt(min(num_tokens, self.num_left), 1)
        start = perf_counter()
        outputs = self._forward(self._num_read, self._num_read + min(num_tokens, self.num_left))
        call.stats.seconds["prefill"] += perf_counter() - start  # type: ignore[assignment]
        if self.num_left:
            return None
        call.model_kwargs = call.model._update_model_kwargs_for_generation(
            outputs, call.model_kwargs
        )
        return PromptRead(outputs.logits[:, -1].clone(), self._tap)

    def _forward(self, start: int, end: int) -> Any:
        """The model over some columns of the prompt, with those in front of them in its KV."""
        model, ids = self._call.model, self._call.input_ids
        kwargs = dict(self._call.model_kwargs)
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = mask[:, :end]
        if (positions := kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = positions[..., start:end]
        with self._tap.open(kwargs) as kwargs:
            inputs = model.prepare_inputs_for_generation(
                ids[:, start:end], is_first_iteration=True, **kwargs
            )
            outputs = model(**inputs, return_dict=True)
        self._num_read = end
        return outputs

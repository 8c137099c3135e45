"""Stock's own loop, for what can't be drafted for; and what a drafted call returns."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from selfspec.compat.generation import decode_plainly, with_kv
from selfspec.errors import UnsupportedError
from selfspec.plugin.call import Call
from selfspec.row import Row, Streamer, output_of
from selfspec.stats import GenerationStats

__all__ = ["SelfSpecOutput", "decoded_plainly", "result_of"]


class _Unended:
    """A streamer for stock's loop that is told the end later, with the statistics set."""

    def __init__(self, streamer: Streamer) -> None:
        self.put = streamer.put

    def end(self) -> None:
        """Does nothing: `SelfSpec.finish` ends the streamer itself."""


class _Counting(StoppingCriteriaList):  # type: ignore[misc]
    """The criteria of a call for stock's loop, which also count the tokens, without pads."""

    def __init__(self, criteria: Iterable[Any]) -> None:
        super().__init__(criteria)
        self.num_tokens: Any = 0  # On the model's device, so that no step waits for it.
        self._goes_on: Any = True  # (B,): which rows get a token of their own.

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        goes_on = self._goes_on & torch.ones_like(is_done)
        self.num_tokens = self.num_tokens + goes_on.sum()
        self._goes_on = goes_on & ~is_done
        return is_done


class SelfSpecOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Stock's output, with the statistics of the call as the attribute `stats`."""

    stats: GenerationStats


def decoded_plainly(call: Call, stats: GenerationStats) -> Any:
    """What stock's loop returns, with the reason noted; an error instead under `strict`."""
    reason = str(call.route.reason)
    stats.disable(reason)
    stats.mode, stats.forward = "plain", "eager"
    if call.config.strict:
        raise UnsupportedError(f"strict=True and the call can't be drafted for: {reason}")
    start, criteria = perf_counter(), _Counting(call.stopping_criteria)
    result = decode_plainly(
        call.model,
        call.input_ids,
        logits_processor=call.logits_processor,
        stopping_criteria=criteria,
        generation_config=call.generation_config,
        streamer=None if call.streamer is None else _Unended(call.streamer),
        synced_gpus=call.synced_gpus,
        **call.model_kwargs,
    )
    stats.spend("plain", perf_counter() - start)
    num_rows = len(call.input_ids)
    num_steps = int(criteria.num_tokens) - num_rows
    stats.num_new_tokens += num_steps + num_rows
    stats.num_prompt_tokens_out += num_rows
    stats.num_steps += num_steps
    stats.num_nodes += num_steps
    return result


def result_of(call: Call, rows: list[Row], cache: object, stats: GenerationStats) -> Any:
    """What stock's `generate()` would return."""
    config = call.generation_config
    if not config.return_dict_in_generate:
        return output_of(rows)
    recorded: Any = rows[0].chooser
    has_encoder = call.model.config.is_encoder_decoder
    output: Any = (GenerateEncoderDecoderOutput if has_encoder else SelfSpecOutput)(
        sequences=output_of(rows),
        scores=tuple(recorded.scores) if config.output_scores else None,
        logits=tuple(recorded.logits) if config.output_logits else None,
        **with_kv(cache),
    )
    output.stats = stats
    return output

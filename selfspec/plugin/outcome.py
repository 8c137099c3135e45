"""How one call is decoded: with drafts by the engine, or by stock's own loop."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from selfspec.compat.generation import KV, decode_plainly
from selfspec.engine import Engine
from selfspec.errors import UnsupportedError
from selfspec.plugin.call import Call
from selfspec.plugin.request import request_of
from selfspec.row import Row, output_of
from selfspec.stats import GenerationStats


class _Counting(StoppingCriteriaList):  # type: ignore[misc]
    """The criteria of a call for stock's loop, which also count the tokens, without pads."""

    def __init__(self, criteria: Iterable[Any]) -> None:
        super().__init__(criteria)
        self.num_tokens: Any = 0  # On the model's device, so that no step waits for it.
        self._goes_on: Any = True  # (B,): which rows have not stopped.

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        goes_on = self._goes_on & torch.ones_like(is_done)
        self.num_tokens = self.num_tokens + goes_on.sum()
        self._goes_on = goes_on & ~is_done
        return is_done


class SelfSpecOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    stats: GenerationStats


def decoded_plainly(call: Call) -> Any:
    reason, stats = str(call.route.reason), call.stats
    stats.disable(reason)
    stats.mode, stats.forward = "plain", "eager"
    if call.config.strict:
        raise UnsupportedError(f"strict=True and the call can't be drafted for: {reason}")
    start, criteria = perf_counter(), _Counting(call.stopping_criteria)
    streamer: Any = call.streamer
    if streamer is not None:  # `SelfSpec.finish` ends it once it has the statistics.
        streamer = SimpleNamespace(put=streamer.put, end=lambda: None)
    result = decode_plainly(
        call.model,
        call.input_ids,
        logits_processor=call.logits_processor,
        stopping_criteria=criteria,
        generation_config=call.generation_config,
        streamer=streamer,
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


def decoded_with_drafts(call: Call, engine: Engine) -> Any:
    request = request_of(call)
    try:
        engine.begin(request)
        cache = engine.admit(request)
        rows = engine.rows
        engine.run()
    finally:
        engine.record_outcome(request)
        engine.backend.release(fills=call.gives_cache_back)
    return _result_of(call, rows, cache)


def _result_of(call: Call, rows: list[Row], cache: object) -> Any:
    config = call.generation_config
    if not config.return_dict_in_generate:
        return output_of(rows)
    recorded: Any = rows[0].chooser
    has_encoder = call.model.config.is_encoder_decoder
    output: Any = (GenerateEncoderDecoderOutput if has_encoder else SelfSpecOutput)(
        sequences=output_of(rows),
        scores=tuple(recorded.scores) if config.output_scores else None,
        logits=tuple(recorded.logits) if config.output_logits else None,
        **{KV: cache},
    )
    output.stats = call.stats
    return output

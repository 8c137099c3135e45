"""The engine of a prompt, and what writes one prompt: it, or transformers' own loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteriaList

from selfspec.ability.look import Look
from selfspec.compat.generation import decode_plainly
from selfspec.engine import Engine
from selfspec.forward.sizes import Limits
from selfspec.machine.device import seeded
from selfspec.prompt import Prompt
from selfspec.runner import ModelRunner


@contextmanager
def open_engine(
    runner: ModelRunner,
    spec: Any,  # The `SelfSpec`, which this ring does not import.
    prompt: Prompt | None,
    look: Look,
    *,
    limits: Limits | None = None,
    keeps_kv: bool = False,
) -> Iterator[Engine]:
    """The engine of one prompt that has it for itself, or of many that come and go within limits.

    At the end it gives up the keys and values, and others may use the model or change its weights.
    """
    if prompt is None:
        opened = runner.backend(look, runner.support(look), limits)
    else:
        prompt.stats.disable(prompt.route.support.reason)  # Chains have a reason, trees have none.
        opened = runner.backend(look, prompt.route.support)
    amount = runner.config.kept_kv
    # A prompt that is alone in the engine has no other text to share with, except kept ones.
    shares = amount != 0 and (keeps_kv or amount is not None or prompt is None)
    with opened as backend:
        engine = spec.engine(runner, backend, prompt, runner.kept_kv(look) if shares else None)
        try:
            yield engine
        finally:
            backend.kv.release(fills=prompt is not None and prompt.gives_cache_back)


@torch.no_grad()
def decode(prompt: Prompt, spec: Any) -> None:
    """Writes the texts of a prompt that waits for no other; an error is the caller's."""
    try:
        if prompt.route.support.mode == "plain":
            decode_with_transformers(prompt)
        else:
            with open_engine(prompt.runner, spec, prompt, prompt.route.look) as engine:
                try:
                    engine.admit(prompt)
                    with prompt.runner.decoding():
                        while not engine.leave():
                            engine.step()
                finally:
                    engine.record_how_it_ran(prompt)
    except BaseException:
        spec.count(prompt)
        raise
    spec.finish(prompt)


class _Counting(StoppingCriteriaList):  # type: ignore[misc]
    """The criteria of a call for transformers' loop, which also count the tokens, without pads."""

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


class _Streamer:
    """Keeps what transformers' loop writes, and hands it on; whoever has the statistics ends it."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def put(self, value: torch.Tensor) -> None:
        self._prompt.result.plain_ids += value.tolist()
        if self._prompt.streamer is not None:
            self._prompt.streamer.put(value)

    def end(self) -> None: ...


def decode_with_transformers(prompt: Prompt) -> None:
    """Writes the texts of a prompt as transformers does; its output is in the prompt."""
    stats = prompt.stats
    stats.disable(prompt.route.support.reason)
    stats.mode, stats.forward = "plain", "eager"
    start, criteria = perf_counter(), _Counting(prompt.stopping_criteria)
    is_streamed = prompt.streamer is not None or prompt.fails_alone
    has_seed = prompt.seed is not None
    with seeded(prompt.seed, [prompt.input_ids.device]) if has_seed else nullcontext():
        prompt.result.output = decode_plainly(
            prompt.model,
            prompt.input_ids,
            logits_processor=prompt.logits_processor,
            stopping_criteria=criteria,
            generation_config=prompt.generation_config,
            streamer=_Streamer(prompt) if is_streamed else None,
            synced_gpus=prompt.synced_gpus,
            **prompt.model_kwargs,
        )
    stats.spend("plain", perf_counter() - start)
    num_rows = len(prompt.input_ids)
    num_steps = int(criteria.num_tokens) - num_rows
    stats.num_new_tokens += num_steps + num_rows
    stats.num_prompt_tokens_out += num_rows
    stats.num_steps += num_steps
    stats.num_nodes += num_steps

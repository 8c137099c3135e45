"""The engine of a prompt, and the loop that writes one prompt as `generate()` asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from selfspec.ability.look import Look
from selfspec.engine import Engine
from selfspec.forward.backends import Backend
from selfspec.forward.sizes import Limits
from selfspec.kept_kv import PrefixStore
from selfspec.plain import decode_with_transformers
from selfspec.prompt import Call, Prompt
from selfspec.runner import ModelRunner


class Assistant(Protocol):
    """The methods of a `SelfSpec` that the functions below call."""

    def engine(
        self,
        runner: ModelRunner,
        backend: Backend,
        prompt: Prompt | None,
        kept_kv: PrefixStore | str | None,
    ) -> Engine: ...

    def finish(self, prompt: Prompt) -> None: ...

    def count(self, call: Call) -> None: ...


@contextmanager
def open_engine(
    runner: ModelRunner,
    spec: Assistant,
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
def decode(prompt: Prompt, spec: Assistant) -> None:
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

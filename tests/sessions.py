"""A session that takes ids and arguments, and gives answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from selfspec import SelfSpec
from selfspec.batch.answers import Answer
from selfspec.batch.prompt_maker import PromptInputs, PromptMaker
from selfspec.prompt import Prompt
from selfspec.session import Session
from tests.fakes import WildSource


class TextSession(Session):
    """What `generate_many`, the server and batch files make of a `Session` and `PromptMaker`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: SelfSpec,
        *,
        on_token: Callable[[int, Sequence[int]], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec.runner(model), spec, **options)
        self.maker = PromptMaker(model, tokenizer, spec)
        self._on_token = on_token

    @property
    def kv(self) -> Any:
        return None if self._engine is None else self._engine.backend.kv

    def open(self) -> None:
        super().open()
        self.call(0, [0], 0, {"max_new_tokens": 1})

    def call(
        self, index: int, inputs: PromptInputs, seed: int | None, arguments: Mapping[str, Any]
    ) -> Prompt:
        on_tokens = None if self._on_token is None else partial(self._on_token, index)
        prompt = self.maker.prompt(index, inputs, seed, arguments, None, on_tokens)
        self.memory.check(prompt)
        return prompt

    def submit(
        self, index: int, inputs: PromptInputs, seed: int | None, arguments: Mapping[str, Any]
    ) -> None:
        self.add(self.call(index, inputs, seed, arguments))

    def step(self) -> list[Answer]:  # type: ignore[override]
        return [Answer.to(prompt, self.maker.tokenizer) for prompt in super().step()]

    def work(self) -> list[Answer]:  # type: ignore[override]
        return super().work()  # type: ignore[return-value]

    def answers(self) -> dict[int, Answer]:
        """The answers to all prompts, by their indices."""
        answers: dict[int, Answer] = {}
        while not self.is_empty:
            answers |= {answer.index: answer for answer in self.work()}
        return answers


def wild(**knobs: Any) -> SelfSpec:
    """Drafts that are right by chance alone, beside those of the sources, in trees of any shape."""
    return SelfSpec(**{"extra_sources": [WildSource()], "budget": "fixed", "max_nodes": 6, **knobs})


def alone(model: Any, prompt: Any, seed: int, **options: Any) -> list[int]:
    """The new tokens of stock's own call for ids, or for what a processor made of a prompt."""
    inputs = prompt
    if not isinstance(prompt, Mapping):
        ids = torch.tensor([list(prompt)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.manual_seed(seed)
    output = model.generate(**inputs, **options)
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())

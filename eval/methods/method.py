"""What a contestant is: a way to call `model.generate()`.

Knows nothing of questions, clocks or tables.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eval.errors import EvalError
from selfspec import GenerationStats, SelfSpec, SpecConfig
from selfspec.cache import CacheContents
from selfspec.compat.heads import num_heads
from selfspec.weights.packing import pack, unpack

_NUM_PADS = 8  # In front of a prompt that stands beside a longer one.


class MethodError(EvalError):
    """There is no method of that name, or what it needs was not given."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What makers choose from.

    `contents` are those of a cache to start with, `options` those that only the method knows,
    `assistant` is the small model of assisted decoding, `tree` the file of a fitted tree, and
    `openvino` a Python that has OpenVINO with the model that it is to run. `datastore` are texts in
    ids.
    """

    config: SpecConfig = field(default_factory=SpecConfig)
    contents: CacheContents | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    assistant: Any = None
    tree: Any = None
    openvino: Any = None
    datastore: Sequence[Sequence[int]] = ()

    def new_spec(self, config: SpecConfig, **more: Any) -> SelfSpec:
        """Cold, or with what the cache holds; takes all else that a `SelfSpec` does by name."""
        return SelfSpec(config, contents=self.contents, **more)


@dataclass
class Method:
    """One contestant: `generate()` with arguments of its own, or none, as it is in stock.

    Whatever its `answer` learns, `forget` drops; `learns` says if it does.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    learns = False

    @property
    def stats(self) -> GenerationStats | None:
        """Of the last answer; None where nobody counts, as in stock."""
        return None

    def refusal(self, model: Any) -> str | None:
        """Why it can't take part with this model on its device; None where it can."""
        return None

    def running(self, model: Any) -> Any:
        """The model that it runs in place of this one, as a rule the same with ordinary weights."""
        unpack(model)
        return model

    def answer(
        self,
        model: Any,
        ids: torch.Tensor,
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        attention_mask: torch.Tensor | None = None,
        streamer: Any = None,
    ) -> torch.Tensor:
        """(B, L): the prompts `ids` and the texts after them.

        `attention_mask` tells prompts from the padding on their left; None: there is none. Seeds
        the global stream first, so that equal draws give equal texts.
        """
        torch.manual_seed(seed)
        output: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if attention_mask is None else attention_mask,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            **sampling(temperature),
            **self.arguments,
        )
        return output

    def forget(self) -> None:
        """Goes back to what it knew before its first answer."""


class StaticMethod(Method):
    """Stock with its static KV cache, for which it compiles its forward.

    It compiles anew where a text is longer than all before: answer the longest one first.
    """

    def refusal(self, model: Any) -> str | None:
        """Without compilation a static cache is only slower."""
        if model.device.type == "cuda":
            return None
        return f"transformers does not compile {type(model).__name__} on {model.device.type}"


class PaddedMethod(Method):
    """Stock, with each prompt left-padded beside a longer one: what its own rounding changes."""

    def answer(self, model: Any, ids: torch.Tensor, **asked: Any) -> torch.Tensor:
        """Of one prompt (1, L)."""
        if len(ids) > 1:
            raise ValueError(f"{self.name} answers one prompt at a time (got {len(ids)})")
        pad, num_pads = model.generation_config.pad_token_id or 0, min(_NUM_PADS, ids.shape[1])
        short = torch.cat([torch.full_like(ids[:, :num_pads], pad), ids], dim=1)
        pair = torch.cat([short, torch.cat([ids[:, :num_pads], ids], dim=1)])
        mask = torch.ones_like(pair)
        mask[0, :num_pads] = 0
        self.arguments = {"pad_token_id": pad}
        row = super().answer(model, pair, **{**asked, "attention_mask": mask})[0, num_pads:]
        new_ids = to_end(row[ids.shape[1] :].tolist(), end_ids(model))
        return row[None, : ids.shape[1] + len(new_ids)]


class Float32Method(Method):
    """Stock on a float32 copy of the model, which is faster on some CPUs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._copy: Any = None

    def refusal(self, model: Any) -> str | None:
        """A model in float32 is stock itself."""
        return "the model is in float32 already" if model.dtype is torch.float32 else None

    def running(self, model: Any) -> Any:
        """The copy, made when it is first asked for."""
        if self._copy is None:
            self._copy = copy.deepcopy(model).float()
        return self._copy


class AssistedMethod(Method):
    """Stock's assisted decoding: another, smaller model drafts a chain."""

    learns = True

    def __init__(self, name: str, assistant: Any) -> None:
        super().__init__(name, {"assistant_model": assistant})
        self._assistant = assistant
        self._start = copy.deepcopy(assistant.generation_config) if assistant else None

    def refusal(self, model: Any) -> str | None:
        """A study has it among its contestants, whether or not there is a small model."""
        return None if self._assistant else "--assistant-model names no small model"

    def forget(self) -> None:
        """transformers keeps what it learns about the assistant in the assistant's own config."""
        if self._assistant:
            self._assistant.generation_config = copy.deepcopy(self._start)


class MtpMethod(Method):
    """Stock's own drafts from the heads that came with the model."""

    def refusal(self, model: Any) -> str | None:
        """Most models have no heads, and transformers runs them from 5.24 on."""
        return None if num_heads(model) else "its config names no heads that transformers can run"


class SelfSpecMethod(Method):
    """Drafts of a `SelfSpec`, which learns from answer to answer."""

    learns = True

    def __init__(self, name: str, spec: SelfSpec) -> None:
        super().__init__(name, {"assistant": spec})
        self.spec = spec

    @property
    def stats(self) -> GenerationStats:
        return self.spec.stats

    def running(self, model: Any) -> Any:
        """The same model with packed weights, where packing pays."""
        pack(model)
        return model

    def forget(self) -> None:
        """Back to the loaded cache or to nothing; what forwards cost here stays known."""
        self.spec.forget()


def end_ids(model: Any) -> frozenset[int]:
    end = model.generation_config.eos_token_id
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


def to_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """What pads a row of a batch after its end is no part of its text."""
    lengths = (length for length, token in enumerate(ids, start=1) if token in ends)
    return ids[: next(lengths, len(ids))]


def sampling(temperature: float) -> dict[str, Any]:
    """Arguments of `generate()`; 0 is greedy."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0}


Maker = Callable[[Resources], Method]

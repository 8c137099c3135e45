"""One `generate()` call, as transformers has prepared it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from selfspec.ability.probe import DraftSupport
from selfspec.compat.generation import update_arguments
from selfspec.config import SpecConfig
from selfspec.draft.sources.prediction import Prediction
from selfspec.forward.prompt import HearsLogits, next_positions
from selfspec.neural.small_model import DraftModel
from selfspec.plugin.refusals import Outcome, reason_for
from selfspec.plugin.row_rules import length_limit
from selfspec.row import Streamer
from selfspec.runner import ModelRunner
from selfspec.stats import GenerationStats


class Route(NamedTuple):
    """How a call is decoded, found out once, before its prompt is read."""

    mode: str  # "tree", "chain" or "plain"
    reason: str | None = None  # Why it is not drafted for with trees.
    together: str | None = None  # What makes each of its rows depend on the others.
    alone: str | None = None  # Why it can share forwards with no other call.


@dataclass(frozen=True, kw_only=True, eq=False)  # Each one is itself, whatever it holds.
class Call:
    """The arguments that a decoding loop gets, before the prompt is read."""

    model: Any
    input_ids: torch.Tensor  # (B, P)
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    streamer: Streamer | None
    model_kwargs: dict[str, Any]
    runner: ModelRunner
    predictions: list[Prediction | None]  # One for each row.
    draft_model: DraftModel | None = None
    has_callers_cache: bool = False  # Did the caller hand in the KV cache?
    synced_gpus: bool = False  # Do other processes wait for each forward?
    inputs_tensor: torch.Tensor | None = None  # What an encoder reads.
    is_default: bool = False  # Did the caller not name the assistant?
    max_nodes: int  # of the trees of a row
    hears: HearsLogits | None = None  # Gets the logits of the whole prompt.
    stats: GenerationStats

    @property
    def config(self) -> SpecConfig:
        return self.runner.config

    @property
    def max_length(self) -> int:
        length = length_limit(self.stopping_criteria)
        return int(self.generation_config.max_length if length is None else length)

    @property
    def num_tokens(self) -> int:
        """How many tokens the prompt has, its padding included."""
        return int(self.input_ids.shape[1])

    @property
    def max_new_columns(self) -> int:
        """The most tokens that may follow the prompt, drafted ones among them."""
        return max(self.max_length - self.num_tokens, 1)

    @property
    def max_columns(self) -> int:
        """The most columns of KV that a row may need, those of the widest tree among them."""
        return self.num_tokens + self.max_new_columns + self.config.max_nodes

    @property
    def gives_cache_back(self) -> bool:
        """Does anybody see the KV cache after the call?"""
        return bool(self.generation_config.return_dict_in_generate) or self.has_callers_cache

    def setting(self, name: str) -> Any:
        return getattr(self.generation_config, name, None)

    @cached_property
    def ability(self) -> DraftSupport:
        ability = self.runner.ability()
        if ability.mode != "tree":
            return ability
        arguments = update_arguments(self.model, dict(self.model_kwargs))
        positions = next_positions(self.model, self.input_ids, arguments)
        return DraftSupport.of_chains(positions) if isinstance(positions, str) else ability

    @cached_property
    def route(self) -> Route:
        """Finding it out may take a trial of the model."""
        reason = reason_for(Outcome.PLAIN, self)
        if reason is None and self.config.strict:
            reason = reason_for(Outcome.CHAINS, self)
        if reason is not None:
            return Route("plain", reason, alone=reason)
        together = reason_for(Outcome.TOGETHER, self)
        shared = together or reason_for(Outcome.TOGETHER_IF_SEVERAL, self)
        is_several = len(self.input_ids) > 1
        own = shared if is_several else together
        return Route(self.ability.mode, self.ability.reason, together=own, alone=shared)

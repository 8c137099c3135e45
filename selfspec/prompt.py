"""A prompt as three values, by the time at which they are true.

Every door makes a `Call` of what transformers has prepared. `plugin.refusals` finds its `Route`,
with which it is a `Prompt`. Whoever writes the texts leaves a `Result` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from selfspec.ability.look import Look
from selfspec.ability.probe import DraftSupport
from selfspec.compat.generation import kv_of
from selfspec.compat.grammars import grammars_of
from selfspec.compat.states import has_states
from selfspec.config import SpecConfig
from selfspec.draft.drafter import Drafter
from selfspec.draft.sources import RowStart, Source
from selfspec.draft.sources.following import Prediction
from selfspec.draft.sources.grammar import GrammarSource
from selfspec.forward.inputs import other_inputs
from selfspec.forward.prompt import (
    OnLogits,
    Prefilled,
    PromptPlan,
    ReadSoFar,
    prompt_placing_reason,
)
from selfspec.row import Row, Streamer, stream_to
from selfspec.row_rules import choosers_of, end_ids
from selfspec.runner import ModelRunner
from selfspec.stats import GenerationStats


@dataclass(frozen=True, kw_only=True, eq=False)  # Compared by identity.
class Call:
    """One call of `generate()`, as transformers prepared it: a prompt of one or more rows."""

    model: PreTrainedModel
    runner: ModelRunner
    input_ids: torch.Tensor  # (B, P)
    model_kwargs: dict[str, Any]
    generation_config: GenerationConfig
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    streamer: Streamer | None  # Hears each token once all rows have it.
    predictions: Sequence[Prediction | None]  # One for each row.
    draft_model: Source | None = None
    max_nodes: int  # of the trees of a row
    max_length: int  # How long a text may get, the prompt with its padding included.
    inputs_tensor: torch.Tensor | None = None  # What an encoder reads.
    has_callers_cache: bool = False  # Did the caller hand in the KV cache?
    synced_gpus: bool = False  # Do other processes wait for each forward?
    is_default: bool = False  # Did the caller not name the assistant?
    stats: GenerationStats

    # If it is one of many that share an engine:
    index: int = 0  # Names it, and its first row in records.
    seed: int | None = None  # Draws the tokens; None: the generator that transformers uses.
    fails_alone: bool = False  # Does an error of one row end this row, and no other?
    # With learning="request", prompts of one request share what was read for them; None: nothing.
    scope: Hashable = None
    on_logits: OnLogits | None = None  # Gets the logits of the whole prompt.
    scores: Any = None  # The `TokenScores` of its text.

    @property
    def config(self) -> SpecConfig:
        return self.runner.config

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


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenCall(Call):
    """A call with a look at its model, of which its route is made."""

    look: Look

    @cached_property
    def support(self) -> DraftSupport:
        """What the model can verify after this prompt; may take a trial of the model."""
        support = self.runner.support(self.look)
        if support.mode != "tree":
            return support
        if reason := prompt_placing_reason(self.model, self.input_ids, self.model_kwargs):
            return DraftSupport.of_chains(reason)._replace(
                read_at_once_reason=support.read_at_once_reason
            )
        return support


@dataclass(frozen=True)
class Route:
    """How a prompt is decoded, as it was found out once.

    `support` is what drafts are verified by after this prompt. Its mode is ``"plain"`` also where
    the model could do more, but the call can't be drafted for.
    """

    look: Look
    support: DraftSupport  # `support.reason` says why trees are not used.
    alone_reason: str | None = None  # Why it can share forwards with no other prompt.
    lockstep_reason: str | None = None  # Why all of its rows get each token at once.


@dataclass
class Result:
    """The texts of a prompt so far, and what ended them."""

    read: ReadSoFar = field(default_factory=ReadSoFar)
    rows: list[Row] = field(default_factory=list)
    kv: Cache | None = None  # The cache that the caller gets.
    output: Any = None  # What transformers' own loop returned.
    plain_ids: list[int] = field(default_factory=list)  # Tokens that this loop gave the streamer.
    error: BaseException | None = None  # The error that ended it.


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt(Call):
    """A call whose route is known. Whoever writes its texts leaves in `result` what came of it."""

    route: Route
    result: Result = field(default_factory=Result)

    @property
    def new_ids(self) -> list[int]:
        """The new tokens of its only row, as far as they came."""
        return rows[0].new_ids if (rows := self.result.rows) else self.result.plain_ids

    @cached_property
    def plan(self) -> PromptPlan:
        """How the prompt is read. Of equal rows (several samples of one text), one is read."""
        number = self._num_samples()
        arguments = {
            name: value[::number] if number > 1 and isinstance(value, torch.Tensor) else value
            for name, value in self.model_kwargs.items()
        }
        return PromptPlan(
            model=self.model,
            input_ids=self.input_ids[::number],
            arguments=arguments,
            generation_config=self.generation_config,
            num_samples=number,
            on_logits=self.on_logits,
            read_at_once_reason=self.route.support.read_at_once_reason,
        )

    def _num_samples(self) -> int:
        """How many rows side by side are alike, so that one of them is read.

        1 where more than the ids and the padding could decide on what is read.
        """
        number = self.generation_config.num_return_sequences or 1
        ids, cache = self.input_ids, kv_of(self.model_kwargs)
        if number == 1 or self.route.support.mode != "tree" or self.has_callers_cache:
            return 1
        # Images may be encoded already, in what is no tensor.
        if any(map(has_states, cache.layers)) or other_inputs(self.model_kwargs):
            return 1
        tensors = {n: v for n, v in self.model_kwargs.items() if isinstance(v, torch.Tensor)}
        if not tensors.keys() <= {"attention_mask", "position_ids"}:
            return 1
        for tensor in (ids, *tensors.values()):
            copies = tensor[::number].repeat_interleave(number, dim=0)
            # Positions may have several planes in front of the rows.
            if tensor.shape != ids.shape or not torch.equal(tensor, copies):
                return 1
        return number

    def new_rows(
        self,
        prefilled: Prefilled,
        shared: RowStart,
        sources: Sequence[Source],
        new_drafter: Callable[..., Drafter],
    ) -> list[Row]:
        """Its rows, once it was read. `shared` and `sources` are what all rows draft from."""
        choosers, stops = choosers_of(
            self.input_ids,
            self.generation_config,
            self.logits_processor,
            self.stopping_criteria,
            None if self.seed is None else self._generator(self.seed),
            in_lockstep=self.route.lockstep_reason is not None,
        )
        ends, pad = end_ids(self.generation_config), self.generation_config.pad_token_id
        if pad is None:
            pad = ends[0] if ends else 0  # transformers' own default.
        # Transformers' own test for filling up rows that stopped.
        gets_pads = any(hasattr(rule, "eos_token_id") for rule in self.stopping_criteria)
        has_encoder, row_sources = self.model.config.is_encoder_decoder, self._sources()
        encoder_texts = self._encoder_texts() if has_encoder else [[]] * len(self.input_ids)
        rows = self.result.rows
        for number, ids in enumerate(prefilled.texts):
            start = replace(
                shared,
                prompt_ids=[*encoder_texts[number], *ids],
                max_new_tokens=self.max_new_columns,
                count_forward=self.stats.count_draft_forward,
                draws=choosers[number].draws,
                states=None if prefilled.hidden is None else prefilled.hidden[number],
            )
            row = Row(
                index=self.index + number,
                prompt=self.input_ids[number : number + 1],
                prompt_ids=ids,
                drafter=new_drafter(start, sources=(*sources, *row_sources[number])),
                chooser=choosers[number],
                max_length=self.max_length,
                max_nodes=self.max_nodes,
                stops=stops,
                pad_token_id=pad,
                gets_pads=gets_pads,
                fails_alone=self.fails_alone,
                may_leave=not (self.gives_cache_back or choosers[number].moves_together),
                stats=self.stats,
            )
            rows.append(row)
        if self.streamer is not None:
            stream_to(self.streamer, rows)
        return rows

    def _sources(self) -> list[list[Source]]:
        """For each row: its prediction, the grammar that its processors follow, a draft model."""
        num_rows = len(self.input_ids)
        grammars = cache(partial(grammars_of, self.logits_processor, num_rows))
        sources: list[list[Source]] = []
        for number, prediction in enumerate(self.predictions):
            named = (prediction, GrammarSource(grammars, number), self.draft_model)
            sources.append([source for source in named if source is not None])
        return sources

    def _encoder_texts(self) -> list[list[int]]:
        """For each row, the text that an encoder has read: an answer may repeat it."""
        ids, num_rows = self.inputs_tensor, len(self.input_ids)
        if ids is None or ids.dim() != 2 or ids.is_floating_point():  # It has read no text.
            return [[]] * num_rows
        ids = ids.repeat_interleave(num_rows // len(ids), dim=0)
        mask = self.model_kwargs.get("attention_mask")
        seen = torch.ones_like(ids) if mask is None else mask
        seen = seen.bool() & (ids >= 0)  # transformers has -100 for outputs that are handed in.
        return [row[shown].tolist() for row, shown in zip(ids, seen, strict=True)]

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.input_ids.device).manual_seed(seed)

"""`Prompt`: one call of `generate()`, from what transformers has prepared to what came of it.

Every door makes one, and everything after it looks at this record alone: `refusals` at its
arguments, a `Session` at its length, the `Engine` at its rows.
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

from selfspec.ability.probe import DraftSupport
from selfspec.compat.generation import kv_of, update_arguments
from selfspec.compat.grammars import grammars_of
from selfspec.compat.states import has_states
from selfspec.config import SpecConfig
from selfspec.draft.drafter import Drafter
from selfspec.draft.sources import RowStart, Source
from selfspec.draft.sources.grammar import GrammarSource, TokenBytes
from selfspec.draft.sources.prediction import Prediction
from selfspec.forward.inputs import other_inputs
from selfspec.forward.prompt import (
    OnLogits,
    Prefilled,
    PromptReader,
    given_positions,
    placing_reason,
)
from selfspec.neural.small_model import DraftModel
from selfspec.row import Row, Stops, Streamer, stream_to
from selfspec.row_rules import end_ids, for_rows, length_limit, row_stops, split_warpers
from selfspec.runner import ModelRunner
from selfspec.stats import GenerationStats
from selfspec.verify.choosers import BatchChooser, Chooser, GreedyChooser, ProcessedChooser
from selfspec.verify.tape import NoiseTape


@dataclass(kw_only=True, eq=False)  # Each one is itself, whatever it holds.
class Prompt:
    """A prompt of one or more rows, and all that decides on their texts.

    `route` in `plugin.refusals` says how it is decoded. Whoever writes the texts leaves what came
    of it in the last fields.
    """

    model: PreTrainedModel
    runner: ModelRunner
    input_ids: torch.Tensor  # (B, P)
    model_kwargs: dict[str, Any]
    generation_config: GenerationConfig
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    streamer: Streamer | None  # Hears each token once all rows have it.
    predictions: Sequence[Prediction | None]  # One for each row.
    draft_model: DraftModel | None = None
    max_nodes: int  # of the trees of a row
    inputs_tensor: torch.Tensor | None = None  # What an encoder reads.
    has_callers_cache: bool = False  # Did the caller hand in the KV cache?
    synced_gpus: bool = False  # Do other processes wait for each forward?
    is_default: bool = False  # Did the caller not name the assistant?
    stats: GenerationStats

    # Of one among many.
    index: int = 0  # Names it, and its first row in records.
    seed: int | None = None  # Draws the tokens; None: the generator that stock uses.
    fails_alone: bool = False  # Does an error of one row end this row, and no other?
    # With learning="request", prompts of one request share what was read for them; None: nothing.
    scope: Hashable = None
    on_logits: OnLogits | None = None  # Gets the logits of the whole prompt.
    scores: Any = None  # The `TokenScores` of its text.
    writes_nothing: bool = False  # Is the prompt only scored, and its one token dropped?

    # How it is decoded, found out once.
    mode: str = ""  # "tree", "chain" or "plain"
    reason: str | None = None  # Why it is not drafted for with trees.
    moves_together: str | None = None  # What makes each of its rows depend on the others.
    runs_alone: str | None = None  # Why it can share forwards with no other prompt.

    # What came of it.
    rows: list[Row] = field(default_factory=list)
    kv: Cache | None = None  # The cache that the caller gets.
    output: Any = None  # That of stock's own loop.
    plain_ids: list[int] = field(default_factory=list)  # What it has told the streamer.
    error: BaseException | None = None  # What has ended it.

    @property
    def config(self) -> SpecConfig:
        return self.runner.config

    @property
    def num_tokens(self) -> int:
        """How many tokens the prompt has, its padding included."""
        return int(self.input_ids.shape[1])

    @cached_property
    def max_length(self) -> int:
        """How long a text may get, the prompt with its padding included."""
        length = length_limit(self.stopping_criteria)
        return int(self.generation_config.max_length if length is None else length)

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

    @property
    def new_ids(self) -> list[int]:
        """The new tokens of its only row, as far as they came."""
        if self.writes_nothing:
            return []
        return self.rows[0].new_ids if self.rows else self.plain_ids

    def setting(self, name: str) -> Any:
        return getattr(self.generation_config, name, None)

    @cached_property
    def ability(self) -> DraftSupport:
        """What the model can verify after this prompt."""
        ability = self.runner.ability()
        if ability.mode != "tree":
            return ability
        arguments = update_arguments(self.model, dict(self.model_kwargs))
        positions = given_positions(self.model, self.input_ids, arguments)
        if reason := placing_reason(positions, arguments):
            return DraftSupport.of_chains(reason)._replace(whole_reason=ability.whole_reason)
        return ability

    @cached_property
    def num_copies(self) -> int:
        """How many rows side by side are alike, as those of `num_return_sequences`: read once.

        1 where more than the ids and the padding could decide on what is read.
        """
        number, ids = self.generation_config.num_return_sequences or 1, self.input_ids
        cache = kv_of(self.model_kwargs)
        if number == 1 or self.ability.mode != "tree" or self.has_callers_cache:
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

    @cached_property
    def reader(self) -> PromptReader:
        """Reads the prompt, of several rows that are alike the first one."""
        every = slice(None, None, self.num_copies)
        model_kwargs = {
            name: value[every] if isinstance(value, torch.Tensor) and self.num_copies > 1 else value
            for name, value in self.model_kwargs.items()
        }
        return PromptReader(
            self.model,
            self.input_ids[every],
            model_kwargs,
            self.generation_config,
            learns=self.config.learning != "frozen",
            on_logits=self.on_logits,
            in_parts=self.ability.whole_reason is None,
        )

    def new_rows(
        self,
        prefilled: Prefilled,
        shared: RowStart,
        sources: Sequence[Source],
        new_drafter: Callable[..., Drafter],
    ) -> list[Row]:
        """Its rows, once it was read. `shared` and `sources` are what all rows draft from."""
        choosers, stops = self._rules()
        ends, pad = end_ids(self.generation_config), self.generation_config.pad_token_id
        if pad is None:
            pad = ends[0] if ends else 0  # As transformers chooses it.
        # Stock's own test for filling up rows that stopped.
        gets_pads = any(hasattr(rule, "eos_token_id") for rule in self.stopping_criteria)
        encoder_texts, own_sources = self._encoder_texts(), self._sources()
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
                drafter=new_drafter(start, sources=(*sources, *own_sources[number])),
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
            self.rows.append(row)
        if self.streamer is not None:
            stream_to(self.streamer, self.rows)
        return self.rows

    def _sources(self) -> list[list[Source]]:
        """For each row: its prediction, the grammar that its processors follow, a draft model."""
        num_rows = len(self.input_ids)
        grammars = cache(partial(grammars_of, self.logits_processor, num_rows, TokenBytes))
        sources: list[list[Source]] = []
        for number, prediction in enumerate(self.predictions):
            named = (prediction, GrammarSource(grammars, number), self.draft_model)
            sources.append([source for source in named if source is not None])
        return sources

    def _encoder_texts(self) -> list[list[int]]:
        """What an encoder has read for each row, which an answer may repeat."""
        ids, num_rows = self.inputs_tensor, len(self.input_ids)
        is_text = ids is not None and ids.dim() == 2 and not ids.is_floating_point()
        if ids is None or not (is_text and self.model.config.is_encoder_decoder):
            return [[]] * num_rows
        ids = ids.repeat_interleave(num_rows // len(ids), dim=0)
        mask = self.model_kwargs.get("attention_mask")
        seen = torch.ones_like(ids) if mask is None else mask
        seen = seen.bool() & (ids >= 0)  # transformers has -100 for outputs that are handed in.
        return [row[shown].tolist() for row, shown in zip(ids, seen, strict=True)]

    def _rules(self) -> tuple[list[Chooser], Stops]:
        """How each row chooses its tokens: by itself, unless something asks for all together."""
        stops, config = row_stops(self.stopping_criteria), self.generation_config
        num_rows, samples = len(self.input_ids), bool(config.do_sample)
        if stops is None or self.moves_together:
            records = bool(config.return_dict_in_generate)
            together = BatchChooser(
                self.input_ids.long(),
                self.logits_processor,
                self.stopping_criteria,
                samples,
                keeps_scores=records and bool(config.output_scores),
                keeps_logits=records and bool(config.output_logits),
                generator=self._generator,
            )
            return [together] * num_rows, Stops()
        if not self.logits_processor and not samples:
            return [GreedyChooser() for _ in range(num_rows)], stops
        tape = NoiseTape(num_rows, self._generator) if samples else None
        processors = for_rows(self.logits_processor, num_rows)
        return [
            ProcessedChooser(split_warpers(of_row), tape, row)
            for row, of_row in enumerate(processors)
        ], stops

    @property
    def _generator(self) -> torch.Generator | None:
        if self.seed is None:
            return None
        return torch.Generator(self.input_ids.device).manual_seed(self.seed)

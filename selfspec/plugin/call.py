"""One `generate()` call, from stock's prepared arguments to stock's kind of result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from selfspec.ability.probe import Ability
from selfspec.compat.generation import decode_plainly, update_arguments, with_kv
from selfspec.compat.grammars import grammars_of
from selfspec.config import SpecConfig
from selfspec.draft.sources.grammar import Grammar, Words
from selfspec.draft.sources.prediction import Prediction
from selfspec.errors import UnsupportedError
from selfspec.forward.model import pad_id, takes
from selfspec.forward.prompt import Prefilled, PromptReader, next_positions
from selfspec.neural.hidden_map import NUM_STATES
from selfspec.neural.small_model import DraftModel
from selfspec.plugin.refusals import Outcome, reason_for
from selfspec.plugin.row_rules import end_ids, for_rows, length_limit, row_stops, split_warpers
from selfspec.records import MAP
from selfspec.row import Row, Stops, Streamer, output_of, stream_to
from selfspec.runner import Run
from selfspec.stats import GenerationStats
from selfspec.verify.choosers import BatchChooser, Chooser, GreedyChooser, ProcessedChooser
from selfspec.verify.tape import NoiseTape


class _Unended:
    """A streamer for stock's loop that is told the end later, with the statistics set."""

    def __init__(self, streamer: Streamer) -> None:
        self.put = streamer.put

    def end(self) -> None:
        """Does nothing: `SelfSpec.finish` ends the streamer itself."""


class SelfSpecOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Stock's output, with the statistics of the call as the attribute `stats`."""

    stats: GenerationStats


@dataclass(kw_only=True, eq=False)  # Each one is itself, whatever it holds.
class Call:
    """One `generate()` call as stock prepared it, and the rules that follow from it."""

    model: Any
    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    streamer: Streamer | None
    model_kwargs: dict[str, Any]  # before the prompt is read
    config: SpecConfig
    run: Run
    stats: GenerationStats
    predictions: list[Prediction | None]  # One for each row.
    draft_model: DraftModel | None = None
    generator: torch.Generator | None = None  # Draws the tokens; None: the one that stock uses.
    has_callers_cache: bool = False  # Was the KV cache handed in?
    synced_gpus: bool = False  # Do other processes wait for each forward?
    inputs_tensor: torch.Tensor | None = None  # What an encoder reads.
    index: int = 0  # Names its first row in records.
    fails_alone: bool = False  # Does an error end its row, and no row of another call?
    # Of a prompt that waits: why it shares forwards with no other, and how it is decoded then.
    alone_reason: str | None = None
    decode_alone: (
        Callable[[Callable[[list[int]], bool]], tuple[list[int], GenerationStats] | None] | None
    ) = None

    def grammars(self) -> list[Grammar | None]:
        """The grammar that each row's processors follow, for drafts; None where there is none."""
        return grammars_of(self.logits_processor, len(self.input_ids), Words)

    @property
    def max_length(self) -> int:
        """How long a text may get, prompt included."""
        length = length_limit(self.stopping_criteria)
        return int(self.generation_config.max_length if length is None else length)

    @property
    def num_tokens(self) -> int:
        """How many tokens the prompt has, its padding included."""
        return int(self.input_ids.shape[1])

    @property
    def reach(self) -> int:
        """How many tokens after the prompt the last one may be, drafted or not."""
        return max(self.max_length - self.num_tokens, 1)

    def setting(self, name: str) -> Any:
        """What the prepared config says."""
        return getattr(self.generation_config, name, None)

    @cached_property
    def ability(self) -> Ability:
        """What the model can verify in this call, tried on first use."""
        ability = self.run.ability()
        if ability.mode != "tree":
            return ability
        arguments = update_arguments(self.model, dict(self.model_kwargs))
        positions = next_positions(self.model, self.input_ids, arguments)
        return Ability.of_chains(positions) if isinstance(positions, str) else ability

    @cached_property
    def reader(self) -> PromptReader:
        """Reads its prompt."""
        learns = self.config.learning != "frozen"
        arguments = (self.model, self.input_ids, self.model_kwargs, self.generation_config)
        num_states = NUM_STATES if MAP in self.config.sources else 0
        return PromptReader(*arguments, learns=learns, num_states=num_states)

    @property
    def plain_reason(self) -> str | None:
        """Why the call has to be decoded plainly; None if it is drafted for."""
        start = perf_counter()
        reason = reason_for(Outcome.PLAIN, self)
        if reason is None and self.config.strict:
            reason = reason_for(Outcome.CHAINS, self)
        self.stats.seconds["prepare"] += perf_counter() - start  # type: ignore[assignment]
        return reason

    def decode_plainly(self, reason: str) -> Any:
        """Stock's own loop, with the reason noted; an error instead under `strict`."""
        self.stats.disable(reason)
        self.stats.mode, self.stats.forward = "plain", "eager"
        if self.config.strict:
            raise UnsupportedError(f"strict=True and the call can't be drafted for: {reason}")
        start = perf_counter()
        result = decode_plainly(
            self.model,
            self.input_ids,
            logits_processor=self.logits_processor,
            stopping_criteria=self.stopping_criteria,
            generation_config=self.generation_config,
            streamer=None if self.streamer is None else _Unended(self.streamer),
            synced_gpus=self.synced_gpus,
            **self.model_kwargs,
        )
        self.stats.seconds["plain"] += perf_counter() - start  # type: ignore[assignment]
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        num_rows, length = sequences.shape
        num_steps = num_rows * (length - self.input_ids.shape[1] - 1)
        self.stats.num_new_tokens += num_steps + num_rows
        self.stats.num_prompt_tokens_out += num_rows
        self.stats.num_steps += num_steps
        self.stats.num_nodes += num_steps
        return result

    @property
    def width(self) -> int:
        """The most queries of a row in one forward."""
        return self.config.max_nodes

    @property
    def need(self) -> int:
        """How many columns of KV each row may come to need, the widest tree's among them."""
        return self.num_tokens + self.reach + self.width

    @property
    def gives_cache_back(self) -> bool:
        """Does anybody see the KV cache after the call?"""
        return bool(self.generation_config.return_dict_in_generate) or self.has_callers_cache

    def rows(self, prompt: Prefilled) -> list[Row]:
        """The rows of a prompt that was read, each with what decides on its tokens."""
        config, ends = self.generation_config, end_ids(self.generation_config)
        pad = config.pad_token_id
        if pad is None:
            pad = ends[0] if ends else 0  # As transformers chooses it.
        choosers, stops = self._choosers()
        # A model that is given no positions may count them itself, without pads.
        unplaced = None if takes(self.model, "position_ids") else pad_id(self.model)
        rows = [
            Row(
                index=self.index + number,
                prompt=self.input_ids[number : number + 1],
                prompt_ids=ids,
                encoder_ids=read,
                unplaced_id=unplaced,
                chooser=chooser,
                max_length=self.max_length,
                stops=stops,
                pad_token_id=pad,
                # Stock's own test for filling up rows that stopped.
                gets_pads=any(hasattr(each, "eos_token_id") for each in self.stopping_criteria),
                fails_alone=self.fails_alone,
                stats=self.stats,
            )
            for number, (ids, read, chooser) in enumerate(
                zip(prompt.texts, self._encoder_texts(), choosers, strict=True)
            )
        ]
        if self.streamer is not None:
            stream_to(self.streamer, rows)
        return rows

    def _encoder_texts(self) -> list[list[int]]:
        """The text that an encoder has read for each row, which an answer may repeat."""
        ids, num_rows = self.inputs_tensor, len(self.input_ids)
        is_text = ids is not None and ids.dim() == 2 and not ids.is_floating_point()
        if ids is None or not (is_text and self.model.config.is_encoder_decoder):
            return [[]] * num_rows
        ids = ids.repeat_interleave(num_rows // len(ids), dim=0)
        mask = self.model_kwargs.get("attention_mask")
        seen = torch.ones_like(ids) if mask is None else mask
        seen = seen.bool() & (ids >= 0)  # transformers has -100 for outputs that are handed in.
        return [row[each].tolist() for row, each in zip(ids, seen, strict=True)]

    def _choosers(self) -> tuple[list[Chooser], Stops]:
        """Rows walk their trees alone unless something asks for them to move together."""
        stops, config = row_stops(self.stopping_criteria), self.generation_config
        num_rows, samples = len(self.input_ids), bool(config.do_sample)
        if stops is None or self.together_reason(several=num_rows > 1):
            kept = (config.output_scores, config.output_logits)
            keeps_scores, keeps_logits = (bool(config.return_dict_in_generate and x) for x in kept)
            rules = (self.logits_processor, self.stopping_criteria, samples)
            together = BatchChooser(self.input_ids.long(), *rules, keeps_scores, keeps_logits)
            return [together] * num_rows, Stops()
        if not self.logits_processor and not samples:
            return [GreedyChooser() for _ in range(num_rows)], stops
        tape = NoiseTape(num_rows, self.generator) if samples else None
        processings = map(split_warpers, for_rows(self.logits_processor, num_rows))
        return [ProcessedChooser(each, tape, row) for row, each in enumerate(processings)], stops

    def together_reason(self, *, several: bool) -> str | None:
        """What makes a row depend on others; None where each walks its tree by itself.

        `several`: whether there are others in its forwards, of this call or of another.
        """
        reason = reason_for(Outcome.TOGETHER, self)
        return reason or (reason_for(Outcome.TOGETHER_IF_SEVERAL, self) if several else None)

    def result(self, rows: list[Row], cache: Any) -> Any:
        """What stock's `generate()` would return."""
        config = self.generation_config
        if not config.return_dict_in_generate:
            return output_of(rows)
        recorded: Any = rows[0].chooser
        has_encoder = self.model.config.is_encoder_decoder
        output: Any = (GenerateEncoderDecoderOutput if has_encoder else SelfSpecOutput)(
            sequences=output_of(rows),
            scores=tuple(recorded.scores) if config.output_scores else None,
            logits=tuple(recorded.logits) if config.output_logits else None,
            **with_kv(cache),
        )
        output.stats = self.stats
        return output

"""One `generate()` call, from stock's prepared arguments to stock's kind of result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.compat.generation import decode_plainly, kv_of, with_kv
from selfspec.config import SpecConfig
from selfspec.cost import Budget, FixedBudget, MeasuredBudget, ThresholdBudget
from selfspec.draft.memory import Memory
from selfspec.draft.row import Row
from selfspec.draft.sources.draft_model import DraftModelCursor
from selfspec.draft.sources.prediction import Prediction
from selfspec.engine import Decoder
from selfspec.errors import UnsupportedError
from selfspec.machine.device import Device
from selfspec.plugin.rules import (
    end_ids,
    for_rows,
    length_limit,
    looks_at_rows,
    plain_reason,
    row_stops,
    split_warpers,
)
from selfspec.run.backend import Backend
from selfspec.run.draft_model import DraftModel, DraftText
from selfspec.run.model import num_readable
from selfspec.run.prepared import Forwards, Prepared
from selfspec.run.probe import Ability, attention_for_trees
from selfspec.run.prompt import Prompt
from selfspec.run.rope import changes_other_rows
from selfspec.run.tree_kv import foreign_layer
from selfspec.stats import GenerationStats
from selfspec.verify.choosers import BatchChooser, Chooser, GreedyChooser, ProcessedChooser
from selfspec.verify.tape import NoiseTape
from selfspec.verify.transcript import Streamer, Transcript
from selfspec.verify.verifier import RowText, Verifier, row_texts


class SelfSpecOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Stock's output with the statistics of the call beside it, as the attribute `stats`."""

    stats: GenerationStats


def keep_up(
    prepared: Prepared, backend: Any, budget: Budget, num_rows: int, *, has_changed: bool = False
) -> None:
    """Packs weights between two steps once that pays; then steps cost something else.

    So they do where rows have come or gone: where the batch `has_changed`.
    """
    if prepared.before_step(num_rows) and backend.kind != prepared.kind:
        backend.kind, has_changed = prepared.kind, True
    if has_changed and isinstance(budget, MeasuredBudget):
        budget.curve = prepared.costs.curve(prepared.model, backend, num_rows)


@dataclass(frozen=True, kw_only=True)
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
    stats: GenerationStats
    predictions: list[Prediction | None]  # One for each row.
    listeners: tuple[Any, ...] = ()
    draft_model: DraftModel | None = None
    generator: torch.Generator | None = None  # Draws the tokens; None: the one that stock uses.
    has_callers_cache: bool = False  # Was the KV cache handed in?
    synced_gpus: bool = False  # Do other processes wait for each forward?

    @property
    def max_length(self) -> int:
        """How long a text may get, prompt included."""
        length = length_limit(self.stopping_criteria)
        return int(self.generation_config.max_length if length is None else length)

    @property
    def reach(self) -> int:
        """How many tokens beyond the prompt the last one may stand, drafted or not."""
        return max(self.max_length - self.input_ids.shape[1], 1)

    def ability(self, forwards: Forwards) -> Ability | str:
        """What the model can verify in this call, or why it has to be decoded plainly."""
        start = perf_counter()
        if self.synced_gpus:
            return "synced_gpus=True lets several processes run their forwards in step"
        reason = plain_reason(self.model, self.generation_config, self.model_kwargs, self.reach)
        if reason is None and self.config.strict:
            attention = attention_for_trees(self.model)
            reason = attention if isinstance(attention, str) else None
        if reason is not None:
            return reason
        ability = forwards.ability(self.model)
        self.stats.seconds["prepare"] += perf_counter() - start  # type: ignore[assignment]
        if ability.reason and (ability.mode == "plain" or self.config.strict):
            return ability.reason
        is_tree = ability.mode == "tree"
        return (foreign_layer(kv_of(self.model_kwargs)) if is_tree else None) or ability

    def decode_plainly(self, reason: str) -> Any:
        """Stock's own loop, with the reason noted; an error instead under `strict`."""
        self.stats.disable(reason)
        self.stats.forward = "eager"
        if self.config.strict:
            raise UnsupportedError(f"strict=True and the call can't be drafted for: {reason}")
        start = perf_counter()
        result = decode_plainly(
            self.model,
            self.input_ids,
            logits_processor=self.logits_processor,
            stopping_criteria=self.stopping_criteria,
            generation_config=self.generation_config,
            streamer=self.streamer,
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
        return self.config.max_nodes + self.config.num_branches * self.config.branch_length

    @property
    def gives_cache_back(self) -> bool:
        """Does anybody see the KV cache behind the call?"""
        return bool(self.generation_config.return_dict_in_generate) or self.has_callers_cache

    def texts(self, ability: Ability, device: Device) -> dict[int, RowText]:
        """The text of each row, and what decides on its tokens by the rules of this call."""
        config, ends = self.generation_config, end_ids(self.generation_config)
        pad = config.pad_token_id
        transcript = Transcript(
            self.input_ids,
            pad_token_id=ends[0] if pad is None and ends else pad,  # As transformers chooses it.
            max_length=self.max_length,
            # Stock's own test for filling up rows that stopped.
            pads_done_rows=any(hasattr(each, "eos_token_id") for each in self.stopping_criteria),
            streamer=self.streamer,
        )
        return row_texts(self._chooser(ability, device), transcript)

    def _chooser(self, ability: Ability, device: Device) -> Chooser:
        """Rows walk their trees alone unless something asks for them to move together."""
        stops, config = row_stops(self.stopping_criteria), self.generation_config
        num_rows, samples = len(self.input_ids), bool(config.do_sample)
        if stops is None or self.together_reason(ability, several=num_rows > 1):
            kept = (config.output_scores, config.output_logits)
            keeps_scores, keeps_logits = (bool(config.return_dict_in_generate and x) for x in kept)
            processors, criteria = self.logits_processor, self.stopping_criteria
            return BatchChooser(processors, criteria, samples, keeps_scores, keeps_logits)
        if not self.logits_processor and not samples:
            return GreedyChooser(stops, device)
        tape = NoiseTape(num_rows, self.generator) if samples else None
        processors = for_rows(self.logits_processor, num_rows)
        warpers = [split_warpers(of_row) for of_row in processors]
        return ProcessedChooser(stops, warpers, tape)

    def together_reason(self, ability: Ability, *, several: bool) -> str | None:
        """What makes a row depend on others; None where each walks its tree by itself.

        `several`: whether there are others in its forwards, of this call or of another.
        """
        config = self.generation_config
        if ability.mode != "tree":
            return ability.reason or "the model can't verify trees"
        if row_stops(self.stopping_criteria) is None:
            return "its stopping criteria look at more than their own row"
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            return "its scores or logits are recorded"
        if not several:
            return None
        if ability.attention is None or ability.attention.scale_period > 0:
            return "the model's attention depends on the columns of a batch"
        if changes_other_rows(self.model.config, self.model_kwargs):
            return "the model's positions depend on the longest row"
        if self.gives_cache_back:
            return "its KV cache is given back"
        if not looks_at_rows(self.logits_processor):
            return "a logits processor may look at other rows"
        return None

    def decoder(
        self,
        prepared: Prepared,
        backend: Backend,
        verifier: Verifier,
        device: Device,
        num_rows: int,
    ) -> Decoder:
        """What decodes a batch of up to `num_rows` rows; it has none of them yet."""
        config = prepared.config
        budget: Budget = ThresholdBudget() if config.budget == "threshold" else FixedBudget()
        if config.budget == "measured":
            curve = prepared.costs.curve(self.model, backend, num_rows)
            budget = MeasuredBudget(curve, prepared.ledger)
        if prepared.ability.mode == "chain":
            config = config.changed(top_k=1, num_branches=0)
        return Decoder(
            backend=backend,
            verifier=verifier,
            config=config,
            stats=self.stats,
            budget=budget,
            device=device,
            listeners=self.listeners,
            num_readable=num_readable(self.model),
            before_step=partial(keep_up, prepared, backend, budget),
        )

    def rows(self, prompt: Prompt, memory: Memory, decoder: Decoder) -> list[Row]:
        """The rows as drafting sees them, behind a prompt that was read."""
        rows = []
        for index, ids in enumerate(prompt.texts):
            cursor = None
            if self.draft_model is not None:
                text = DraftText(self.draft_model)
                cursor = DraftModelCursor(text, ids, decoder.budget.least_chance, self.reach)
            expected = self.predictions[index]
            rows.append(Row.open(index, ids, memory, decoder.config, expected, cursor))
        return rows

    def note(self, prepared: Prepared, backend: Backend) -> None:
        """Notes how the forwards of a call that is over, or broke off, were run."""
        self.stats.forward = backend.kind
        self.stats.packed_bytes = prepared.packed_bytes
        self.stats.eager_reason = backend.reason or prepared.reason
        if self.draft_model is not None:
            self.stats.num_draft_forwards = self.draft_model.num_forwards

    def result(self, text: RowText, cache: Any) -> Any:
        """What stock's `generate()` would return; `text` is any row's."""
        sequences = text.transcript.sequences()
        config = self.generation_config
        if not config.return_dict_in_generate:
            return sequences
        recorded: Any = text.chooser
        output = SelfSpecOutput(
            sequences=sequences,
            scores=tuple(recorded.scores) if config.output_scores else None,
            logits=tuple(recorded.logits) if config.output_logits else None,
            **with_kv(cache),
        )
        output.stats = self.stats
        return output

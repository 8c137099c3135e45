"""One `generate()` call, from stock's prepared arguments to stock's kind of result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.config import SpecConfig
from selfspec.cost import Budget, FixedBudget, MeasuredBudget, ThresholdBudget
from selfspec.draft.memory import Memory
from selfspec.draft.row import Row
from selfspec.draft.sources.draft_model import DraftModelCursor
from selfspec.draft.sources.prediction import Prediction
from selfspec.engine import Decoder, FirstTokens, first_tokens
from selfspec.errors import UnsupportedError
from selfspec.machine.device import Device, device_for
from selfspec.plugin.prompt import PromptTap
from selfspec.plugin.rules import for_rows, has_eos_rule, in_two, looks_at_rows, row_stops
from selfspec.run.backend import Backend
from selfspec.run.draft_model import DraftModel
from selfspec.run.prepared import Prepared, Prompt
from selfspec.run.probe import Ability
from selfspec.run.rope import changes_other_rows
from selfspec.run.tree_kv import foreign_layer
from selfspec.stats import GenerationStats
from selfspec.verify.choosers import BatchChooser, Chooser, GreedyChooser, ProcessedChooser
from selfspec.verify.noise import NoiseTape
from selfspec.verify.transcript import Streamer, Transcript
from selfspec.verify.verifier import Verifier

__all__ = ["Call", "SelfSpecOutput", "pack_between_steps"]

_STEPS_THAT_TEACH = 16  # Shorter calls teach too little of costs to be written down.


class SelfSpecOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Stock's output with the statistics of the call beside it, as the attribute `stats`."""

    stats: GenerationStats


def pack_between_steps(prepared: Prepared, decoder: Decoder) -> None:
    """Lets a decoder's steps pack weights once that pays; then forwards cost something else."""

    backend: Any = decoder.backend

    def before_step(num_rows: int) -> None:
        if prepared.before_step(num_rows) and backend.kind != prepared.kind:
            backend.kind = prepared.kind
            if isinstance(decoder.budget, MeasuredBudget):
                decoder.budget.use(prepared.curve(backend, num_rows))

    decoder.before_step = before_step


class PromptRead(NamedTuple):
    """What the prompt's forward leaves behind."""

    logits: torch.Tensor  # (B, V): those of the last token
    tap: PromptTap


class _Opening(NamedTuple):
    """What is there when every row has its first token."""

    verifier: Verifier
    device: Device
    first: FirstTokens


@dataclass
class Call:
    """The arguments of one call, as `generate()` prepared them."""

    model: Any
    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    streamer: Streamer | None
    model_kwargs: dict[str, Any]
    config: SpecConfig
    stats: GenerationStats
    predictions: list[Prediction | None]  # One for each row.
    listeners: tuple[Any, ...] = ()
    draft_model: DraftModel | None = None
    generator: torch.Generator | None = None  # Draws the tokens; None: the one that stock uses.

    @property
    def max_reach(self) -> int:
        """How many tokens beyond the prompt the last one may stand, drafted or not."""
        to_come: int = self.generation_config.max_length - self.input_ids.shape[1]
        return max(to_come, 1)

    def decode_plainly(self, reason: str) -> Any:
        """Stock's own loop, with the reason noted; an error instead under `strict`."""
        self.stats.disable(reason)
        self.stats.forward = "eager"
        if self.config.strict:
            raise UnsupportedError(f"strict=True and the call can't be drafted for: {reason}")
        start = perf_counter()
        result = type(self.model)._sample(
            self.model,
            self.input_ids,
            logits_processor=self.logits_processor,
            stopping_criteria=self.stopping_criteria,
            generation_config=self.generation_config,
            streamer=self.streamer,
            **self.model_kwargs,
        )
        self.stats.seconds["plain"] += perf_counter() - start  # type: ignore[assignment]
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        num_rows, length = sequences.shape
        self._count_plain(num_rows, length - self.input_ids.shape[1])
        return result

    def decode(self, prepared: Prepared, memory_for: Callable[[int], Memory]) -> Any:
        """Drafts as far as the model's ability goes; `memory_for(vocab_size)` is what it learns."""
        cache = self.model_kwargs["past_key_values"]
        if prepared.ability.mode == "tree" and (reason := foreign_layer(cache)):
            return self.decode_plainly(reason)
        self.stats.disable(prepared.ability.reason)
        with prepared.reading():
            read = self.read_prompt(prepared)
            opening = self._opening(prepared.ability, read.logits)
            memory = self.learn_prompt(read, memory_for)
        self.stats.table_bytes = memory.nbytes
        with prepared.decoding():
            self._run(prepared, memory, opening)
        opening.verifier.transcript.end()
        return self._result(opening.verifier)

    def _run(self, prepared: Prepared, memory: Memory, opening: _Opening) -> None:
        """Puts the parts together and decodes to the end."""
        backend = prepared.backend(self._prompt())
        try:
            decoder = self._decoder(prepared, backend, memory, opening)
            pack_between_steps(prepared, decoder)
            decoder.start(opening.first)
            decoder.run()
        finally:
            self.stats.forward = backend.kind
            self.stats.packed_bytes = prepared.packed_bytes
            self.stats.eager_reason = backend.reason or prepared.reason
            if self.draft_model is not None:
                self.stats.num_draft_forwards = self.draft_model.num_forwards
            backend.release()
        if self.stats.num_steps >= _STEPS_THAT_TEACH:
            prepared.costs.keep()

    def _count_plain(self, num_rows: int, num_new: int) -> None:
        self.stats.num_new_tokens += num_rows * num_new
        self.stats.num_prompt_tokens_out += num_rows
        self.stats.num_steps += num_rows * (num_new - 1)
        self.stats.num_nodes += num_rows * (num_new - 1)

    def read_prompt(self, prepared: Prepared) -> PromptRead:
        """Runs the prompt. Afterwards the model's arguments stand for the first step."""
        start = perf_counter()
        num_known = self.model_kwargs["past_key_values"].get_seq_length()
        num_rows, length = self.input_ids.shape
        prepared.before_prompt(num_rows * max(length - num_known, 1), num_rows)
        self.stats.seconds["prepare"] += perf_counter() - start  # type: ignore[assignment]
        start = perf_counter()
        tap = PromptTap(self.model, listens=self.config.learning != "frozen")
        with tap.open(self.model_kwargs) as kwargs:
            outputs = self.model._prefill(self.input_ids, self.generation_config, kwargs)
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs
        )
        logits = outputs.logits[:, -1].clone()  # A view would keep the whole prompt's.
        self.stats.seconds["prefill"] += perf_counter() - start  # type: ignore[assignment]
        return PromptRead(logits, tap)

    def learn_prompt(self, read: PromptRead, memory_for: Callable[[int], Memory]) -> Memory:
        """What drafts come from, with what the model said behind the prompt's tokens."""
        start = perf_counter()
        memory = memory_for(read.logits.shape[-1])
        if memory.learns:
            read.tap.teach(memory, self.input_ids, self._visible, read.logits)
        self.stats.seconds["learn"] += perf_counter() - start  # type: ignore[assignment]
        return memory

    def _opening(self, ability: Ability, logits: torch.Tensor) -> _Opening:
        """Chooses the tokens behind the prompt; a streamer gets them here."""
        device = device_for(logits.device, overlap=self.config.overlap)
        verifier = self.verifier(ability, device)
        last_tokens = [ids[-1] if ids else 0 for ids in self._texts]
        first = first_tokens(verifier, range(len(last_tokens)), last_tokens, logits)
        return _Opening(verifier, device, first)

    @cached_property
    def _texts(self) -> list[list[int]]:
        """The prompt of each row, without padding."""
        visible = self._visible
        if visible is None or not self.input_ids.shape[1]:
            return self.input_ids.tolist()
        pairs = zip(self.input_ids, visible, strict=True)
        return [ids[seen[-len(ids) :]].tolist() for ids, seen in pairs]

    @cached_property
    def _visible(self) -> torch.Tensor | None:
        """(B, P): which columns of the prompt count, once it was read; None where all do."""
        mask = self.model_kwargs.get("attention_mask")
        # Older versions of transformers keep a mask that hides nothing.
        return None if mask is None or mask.all() else mask[:, :-1].bool()

    def _prompt(self) -> Prompt:
        return Prompt(
            self.model_kwargs["past_key_values"],
            self.input_ids,
            self._visible,
            self.model_kwargs,
            self.max_reach,
            self.width,
        )

    @property
    def width(self) -> int:
        """The most queries of a row in one forward."""
        return self.config.max_nodes + self.config.num_branches * self.config.branch_length

    def verifier(self, ability: Ability, device: Device) -> Verifier:
        """What decides on the tokens, by the rules of this call, and keeps the text."""
        pad = self.generation_config._pad_token_tensor
        transcript = Transcript(
            self.input_ids,
            pad_token_id=None if pad is None else int(pad),
            max_length=self.generation_config.max_length,
            pads_done_rows=has_eos_rule(self.stopping_criteria),
            streamer=self.streamer,
        )
        return Verifier(self._chooser(ability, device), transcript)

    def _decoder(
        self, prepared: Prepared, backend: Backend, memory: Memory, opening: _Opening
    ) -> Decoder:
        chains = prepared.ability.mode == "chain"
        config = self.config.changed(top_k=1, num_branches=0) if chains else self.config
        budget = self.budget(prepared, backend, len(self.input_ids))
        return Decoder(
            backend=backend,
            verifier=opening.verifier,
            rows=self.rows(memory, config, budget),
            config=config,
            stats=self.stats,
            budget=budget,
            device=opening.device,
            listeners=self.listeners,
        )

    def budget(self, prepared: Prepared, backend: Backend, num_rows: int) -> Budget:
        """What decides how wide the steps of so many rows are."""
        if self.config.budget == "threshold":
            return ThresholdBudget()
        if self.config.budget in ("fixed", "fitted"):
            return FixedBudget()
        pacing = None if self.draft_model is None else self.draft_model.pacing
        return MeasuredBudget(prepared.curve(backend, num_rows), pacing, prepared.ledger)

    def _chooser(self, ability: Ability, device: Device) -> Chooser:
        """Rows walk their trees alone unless something asks for them to move together."""
        stops = row_stops(self.stopping_criteria)
        if stops is None or self._moves_together(ability, several=len(self.input_ids) > 1):
            return self._batch_chooser()
        if not self.logits_processor and not self.generation_config.do_sample:
            return GreedyChooser(stops, device)
        num_rows, samples = len(self.input_ids), self.generation_config.do_sample
        tape = NoiseTape(num_rows, self.generator) if samples else None
        processors = for_rows(self.logits_processor, num_rows)
        return ProcessedChooser(stops, [in_two(of_row) for of_row in processors], tape)

    def alone_reason(self, ability: Ability) -> str | None:
        """Why other prompts in the same forwards could change what this call does; else None."""
        if ability.mode != "tree":
            return ability.reason or "the model can't verify trees"
        if row_stops(self.stopping_criteria) is None:
            return "its stopping criteria look at more than their own row"
        return self._together_reason(ability, several=True)

    def _moves_together(self, ability: Ability, *, several: bool) -> bool:
        return (
            ability.mode == "chain" or self._together_reason(ability, several=several) is not None
        )

    def _together_reason(self, ability: Ability, *, several: bool) -> str | None:
        """What makes rows depend on each other; None where each walks its tree by itself."""
        config = self.generation_config
        returns_dict = config.return_dict_in_generate
        if returns_dict and (config.output_scores or config.output_logits):
            return "its scores or logits are recorded"
        if not several:
            return None
        if ability.attention is None or ability.attention.scale_period > 0:
            return "the model's attention depends on the columns of a batch"
        if changes_other_rows(self.model.config, self.model_kwargs):
            return "the model's positions depend on the longest row"
        if returns_dict or getattr(self.model_kwargs["past_key_values"], "_is_user_defined", False):
            return "its KV cache is given back"
        if not looks_at_rows(self.logits_processor):
            return "a logits processor may look at other rows"
        return None

    def _batch_chooser(self) -> BatchChooser:
        config = self.generation_config
        return BatchChooser(
            processors=self.logits_processor,
            criteria=self.stopping_criteria,
            do_sample=bool(config.do_sample),
            keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
            keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
        )

    def rows(self, memory: Memory, config: SpecConfig, budget: Budget) -> list[Row]:
        """The rows as drafting sees them, behind a prompt that was read."""
        rows = []
        for index, ids in enumerate(self._texts):
            cursor = None
            if self.draft_model is not None:
                cursor = DraftModelCursor(self.draft_model.open(), ids, budget)
            rows.append(Row.open(index, ids, memory, config, self.predictions[index], cursor))
        return rows

    def _result(self, verifier: Verifier) -> Any:
        sequences = verifier.transcript.sequences()
        config = self.generation_config
        if not config.return_dict_in_generate:
            return sequences
        recorded: Any = verifier.chooser
        output = SelfSpecOutput(
            sequences=sequences,
            scores=tuple(recorded.scores) if config.output_scores else None,
            logits=tuple(recorded.logits) if config.output_logits else None,
            past_key_values=self.model_kwargs["past_key_values"],
        )
        output.stats = self.stats
        return output

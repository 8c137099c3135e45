"""What of a `generate()` call looks at one row alone: its processors and its stopping rules.

Reads transformers' objects; runs nothing.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
    logits_process,
)

from selfspec.row import Stops
from selfspec.verify.choosers import (
    BatchChooser,
    Chooser,
    GreedyChooser,
    ProcessedChooser,
    Processing,
)
from selfspec.verify.shortlist import Warpers
from selfspec.verify.tape import NoiseTape

# Processors whose scores for a row depend on that row alone. Others, user-made ones among them,
# may look at the batch or count their calls: for them the rows of a batch move together.
_ROW_PROCESSORS = {
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.MinPLogitsWarper,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
}

# Warpers that may end a list of processors, in this order, and the argument of each.
_KNOWN_WARPERS = (
    ("temperature", logits_process.TemperatureLogitsWarper),
    ("top_k", logits_process.TopKLogitsWarper),
    ("top_p", logits_process.TopPLogitsWarper),
    ("min_p", logits_process.MinPLogitsWarper),
)


def end_ids(generation_config: GenerationConfig) -> list[int]:
    """The tokens that end a text; none if nothing but its length does."""
    ends = generation_config.eos_token_id
    if ends is None:
        return []
    return [int(token) for token in torch.as_tensor(ends, device="cpu").flatten()]


def for_rows(processors: LogitsProcessorList, num_rows: int) -> list[Any]:
    """The processors of each row: the same objects, except those that hold a value for each row."""
    return [
        type(processors)(_for_row(processor, row) for processor in processors)
        for row in range(num_rows)
    ]


def _for_row(processor: Any, row: int) -> Any:
    # transformers gives the repetition penalty a tensor with the padding of all rows. A number does
    # the same for one row, also where several prefixes of that row are processed at once.
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, torch.Tensor):
        return processor
    if len(padding) == 1 and type(processor) not in _ROW_PROCESSORS:
        return processor  # A copy could count calls that its owner looks for.
    twin = copy.copy(processor)
    twin.prompt_ignore_length = int(padding[row])
    return twin


def split_warpers(processors: LogitsProcessorList) -> Processing:
    """A row's processors, with the warpers at their end apart, which a shortlist can compute."""
    arguments: dict[str, Any] = {}
    num_first = len(processors)
    for name, warper in reversed(_KNOWN_WARPERS):
        last = processors[num_first - 1] if num_first else None
        if type(last) is warper and _rules_all_out(last):
            arguments[name] = getattr(last, name)
            num_first -= 1
    if not arguments:
        return Processing(processors)
    first, last = (type(processors)(p) for p in (processors[:num_first], processors[num_first:]))
    return Processing(first or None, last, Warpers(**arguments))


def _rules_all_out(warper: Any) -> bool:
    keeps = getattr(warper, "min_tokens_to_keep", 1)
    return keeps == 1 and getattr(warper, "filter_value", -math.inf) == -math.inf


def are_row_wise(processors: Sequence[Any]) -> bool:
    """Do all processors treat each row by itself, without state?"""
    return all(type(part) in _ROW_PROCESSORS or _says_row_wise(part) for part in processors)


def _says_row_wise(part: Any) -> bool:
    # `looks_at_rows` was the name until 0.4.
    return getattr(part, "is_row_wise", False) or getattr(part, "looks_at_rows", False)


def row_stops(criteria: StoppingCriteriaList) -> Stops | None:
    """The stopping rules where all of them look at one row alone; else None."""
    eos_ids: frozenset[int] = frozenset()
    others = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos_ids |= frozenset(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is StopStringCriteria or _says_row_wise(criterion):
            others.append(criterion)
        elif type(criterion) is not MaxLengthCriteria:
            return None
    if length_limit(criteria) is None or (others and not eos_ids):
        return None  # without an end token, transformers lets a row that stopped go on writing
    return Stops(eos_ids, tuple(others))


def start_clocks(criteria: StoppingCriteriaList) -> None:
    """Lets what bounds the time of a text count from now, not from when its prompt came."""
    for criterion in criteria:
        if type(criterion) is MaxTimeCriteria:
            criterion.initial_timestamp = time.time()


def length_limit(criteria: StoppingCriteriaList) -> int | None:
    """How long a text may get, prompt included: the least that a criterion says, if any does.

    A criterion of the caller's takes the place of the one that `generate()` makes of its config.
    """
    limits = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
    return min((limit.max_length for limit in limits), default=None)


def choosers_of(
    input_ids: torch.Tensor,  # (B, P)
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generator: torch.Generator | None,
    *,
    in_lockstep: bool,
) -> tuple[list[Chooser], Stops]:
    """How each row chooses its tokens: by itself, unless something asks for all together."""
    stops, num_rows, samples = row_stops(criteria), len(input_ids), bool(config.do_sample)
    if stops is None or in_lockstep:
        records = bool(config.return_dict_in_generate)
        together = BatchChooser(
            input_ids.long(),
            processors,
            criteria,
            samples,
            keeps_scores=records and bool(config.output_scores),
            keeps_logits=records and bool(config.output_logits),
            generator=generator,
        )
        return [together] * num_rows, Stops()
    if not processors and not samples:
        return [GreedyChooser() for _ in range(num_rows)], stops
    tape = NoiseTape(num_rows, generator) if samples else None
    of_rows = [split_warpers(of_row) for of_row in for_rows(processors, num_rows)]
    return [ProcessedChooser(of_row, tape, row) for row, of_row in enumerate(of_rows)], stops

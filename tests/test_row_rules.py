"""What of a call looks at one row alone: its processors and its stopping rules."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

from selfspec import row_rules
from selfspec.row_rules import (
    are_row_wise,
    for_rows,
    row_stops,
    split_warpers,
)
from selfspec.verify.choosers import Processing
from selfspec.verify.shortlist import Warpers

VOCAB, LENGTH = 31, 6


def penalty_behind(*padding: int) -> lp.RepetitionPenaltyLogitsProcessor:
    """For a batch of padded prompts, where this version of transformers knows of padding."""
    try:
        return lp.RepetitionPenaltyLogitsProcessor(1.7, torch.tensor(padding))
    except ValueError:
        return pytest.skip("this version of transformers penalizes padding, too")


# one of each kind that drafting knows, set so that it does something
ROW_PROCESSORS = {
    "EpsilonLogitsWarper": lambda: lp.EpsilonLogitsWarper(0.02),
    "EtaLogitsWarper": lambda: lp.EtaLogitsWarper(0.02),
    "ExponentialDecayLengthPenalty": lambda: lp.ExponentialDecayLengthPenalty((1, 1.4), 3, 2),
    "ForcedBOSTokenLogitsProcessor": lambda: lp.ForcedBOSTokenLogitsProcessor(3),
    "ForcedEOSTokenLogitsProcessor": lambda: lp.ForcedEOSTokenLogitsProcessor(LENGTH + 1, 3),
    "InfNanRemoveLogitsProcessor": lambda: lp.InfNanRemoveLogitsProcessor(),
    "LogitNormalization": lambda: lp.LogitNormalization(),
    "MinLengthLogitsProcessor": lambda: lp.MinLengthLogitsProcessor(LENGTH + 1, 3),
    "MinNewTokensLengthLogitsProcessor": lambda: lp.MinNewTokensLengthLogitsProcessor(4, 3, 3),
    "MinPLogitsWarper": lambda: lp.MinPLogitsWarper(0.2),
    "NoBadWordsLogitsProcessor": lambda: lp.NoBadWordsLogitsProcessor([[4], [2, 5]], 3),
    "NoRepeatNGramLogitsProcessor": lambda: lp.NoRepeatNGramLogitsProcessor(2),
    "RepetitionPenaltyLogitsProcessor": lambda: penalty_behind(1, 3, 0),
    "SequenceBiasLogitsProcessor": lambda: lp.SequenceBiasLogitsProcessor([[[4], 2.0]]),
    "SuppressTokensAtBeginLogitsProcessor": lambda: lp.SuppressTokensAtBeginLogitsProcessor(
        [4, 5], LENGTH
    ),
    "SuppressTokensLogitsProcessor": lambda: lp.SuppressTokensLogitsProcessor([4, 5]),
    "TemperatureLogitsWarper": lambda: lp.TemperatureLogitsWarper(0.7),
    "TopHLogitsWarper": lambda: lp.TopHLogitsWarper(0.4),
    "TopKLogitsWarper": lambda: lp.TopKLogitsWarper(5),
    "TopPLogitsWarper": lambda: lp.TopPLogitsWarper(0.6),
    "TypicalLogitsWarper": lambda: lp.TypicalLogitsWarper(0.6),
}


def three_rows(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefixes and scores for a processor."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 8, (3, LENGTH), generator=generator)
    scores = torch.randn(3, VOCAB, generator=generator)
    scores[2, 8] = -torch.inf
    if name == "InfNanRemoveLogitsProcessor":  # others refuse what this one mends
        scores[1, 7], scores[2, 9] = torch.inf, torch.nan
    return ids, scores


def test_each_of_the_known_processors_is_tried_here():
    assert {kind.__name__ for kind in row_rules._ROW_PROCESSORS} == ROW_PROCESSORS.keys()


@pytest.mark.parametrize("name", ROW_PROCESSORS)
def test_row_processors_give_each_row_what_it_gets_in_the_batch(name):
    ids, scores = three_rows(name)
    batch = LogitsProcessorList([ROW_PROCESSORS[name]()])
    assert are_row_wise(batch)
    together = batch(ids, scores.clone())
    for row, processors in enumerate(for_rows(LogitsProcessorList(batch), 3)):
        alone = processors(ids[row : row + 1], scores[row : row + 1].clone())
        torch.testing.assert_close(alone, together[row : row + 1], rtol=0, atol=0, equal_nan=True)


def test_for_rows_shares_what_it_can():
    temperature, penalty = lp.TemperatureLogitsWarper(0.7), penalty_behind(1, 3)
    first, second = for_rows(LogitsProcessorList([temperature, penalty]), 2)
    assert first[0] is second[0] is temperature
    assert first[1] is not second[1]
    assert penalty.prompt_ignore_length.tolist() == [1, 3]


WARPED = [
    lp.TemperatureLogitsWarper(0.7),
    lp.TopKLogitsWarper(20),
    lp.TopPLogitsWarper(0.8),
    lp.MinPLogitsWarper(0.1),
]


def penalty_and(*warpers):
    return LogitsProcessorList([lp.RepetitionPenaltyLogitsProcessor(1.1), *warpers])


@pytest.mark.parametrize("kept", [(0,), (0, 1), (1,), (2,), (3,), (0, 1, 2, 3), (1, 3)])
def test_warpers_at_the_end_are_known(kept):
    warpers = [WARPED[place] for place in kept]
    processing = split_warpers(penalty_and(*warpers))
    values = (0.7, 20, 0.8, 0.1)
    assert processing.warpers == Warpers(*(values[n] if n in kept else None for n in range(4)))
    assert list(processing.last) == warpers
    assert len(processing.first) == 1
    ids, scores = torch.tensor([[1, 2]]), torch.randn(1, 50)
    in_turns = processing.last(ids, processing.first(ids, scores.clone()))
    assert torch.equal(in_turns, penalty_and(*warpers)(ids, scores.clone()))


class CustomTopK(lp.TopKLogitsWarper):
    """May do anything that its base does not."""


@pytest.mark.parametrize(
    "warpers",
    [
        [],
        [lp.TopKLogitsWarper(20), lp.TypicalLogitsWarper(0.9)],
        [lp.TopKLogitsWarper(20, min_tokens_to_keep=2)],
        [lp.TopPLogitsWarper(0.9, filter_value=-100.0)],
        [CustomTopK(5)],
    ],
)
def test_others_are_left_to_themselves(warpers):
    processors = penalty_and(*warpers)
    assert split_warpers(processors) == Processing(processors)


def test_only_those_that_stand_in_stocks_order_are_known():
    top_p, top_k = lp.TopPLogitsWarper(0.9), lp.TopKLogitsWarper(5)
    processing = split_warpers(LogitsProcessorList([top_p, top_k]))
    assert processing.warpers == Warpers(top_k=5)
    assert list(processing.first) == [top_p]


class Custom(lp.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    "processor",
    [
        Custom(),
        CustomTopK(3),
        lambda input_ids, scores: scores,
        lp.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], 1),
        lp.ClassifierFreeGuidanceLogitsProcessor(2.0),
    ],
)
def test_what_may_look_at_the_batch_makes_rows_move_together(processor):
    assert not are_row_wise([lp.TopKLogitsWarper(3), processor])


def test_a_processor_may_say_that_it_is_row_wise():
    older, processor = Custom(), Custom()
    older.looks_at_rows = True  # The name until 0.4.
    assert are_row_wise([older])
    processor.is_row_wise = True
    assert are_row_wise([processor, lp.TopKLogitsWarper(3)])
    assert are_row_wise([])


EOS = sc.EosTokenCriteria(torch.tensor([3, 5]))
SHORT = sc.MaxLengthCriteria(9)


def stop_string() -> sc.StopStringCriteria:
    criterion = sc.StopStringCriteria.__new__(sc.StopStringCriteria)
    criterion.stop_strings = ("x",)
    return criterion


def test_stops_that_look_at_one_row():
    """A stop string does where rows are padded at all."""
    more, string = sc.EosTokenCriteria(torch.tensor([7])), stop_string()
    assert row_stops(StoppingCriteriaList([SHORT, EOS])) == ({3, 5}, ())
    assert row_stops(StoppingCriteriaList([SHORT, EOS, more])).eos_ids == {3, 5, 7}
    assert list(row_stops(StoppingCriteriaList([SHORT, EOS, string])).criteria) == [string]
    assert row_stops(StoppingCriteriaList([SHORT, string])) is None
    own = CustomStop()
    own.is_row_wise = True
    assert list(row_stops(StoppingCriteriaList([SHORT, EOS, own])).criteria) == [own]


class CustomStop(sc.StoppingCriteria):
    pass


@pytest.mark.parametrize(
    "criteria",
    [
        [EOS],  # without an end in sight
        [SHORT, sc.MaxTimeCriteria(1.0)],
        [SHORT, EOS, CustomStop()],
        [SHORT, lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)],
        [type("MyEos", (sc.EosTokenCriteria,), {})(torch.tensor([3])), SHORT],
    ],
)
def test_other_stops_make_rows_move_together(criteria):
    assert row_stops(StoppingCriteriaList(criteria)) is None

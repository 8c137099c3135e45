"""Stopping criteria of the user's own: counting, looking at scores, stopping single rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from tests.fakes import prompt, tiny_model
from tests.lossless.same import MODES, NUM_COLUMNS, ROUNDING, Call, knowing, run, run_both

SCORED = {"return_dict_in_generate": True, "output_scores": True}


class Criterion(StoppingCriteria):
    """Notes every call: the ids it saw and the last of the scores."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.scores: list[tuple[int, torch.Tensor] | None] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.ids.append(input_ids.clone())
        self.scores.append(None if scores is None else (len(scores), scores[-1].clone()))
        return self.stops(input_ids, scores)

    def stops(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Counting(Criterion):
    """Stops all rows at the thirteenth call."""

    def stops(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), len(self.ids) >= 13)


class SingleRows(Criterion):
    """Stops a row the longer it has to wait the higher its index."""

    def stops(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return input_ids.shape[1] >= NUM_COLUMNS + 4 + 7 * torch.arange(len(input_ids))


class Sure(Criterion):
    """Stops a row where the model is very sure of a token; needs the scores."""

    def stops(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if scores is None:
            return super().stops(input_ids, scores)
        return scores[-1].softmax(-1).amax(-1) > 0.9


class AcrossRows(Criterion):
    """Stops all rows where two of them say the same."""

    def stops(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        num_tokens = len(input_ids[:, -1].unique())
        return torch.full((len(input_ids),), 1 < len(input_ids) != num_tokens)


def assert_same_calls(ours: Criterion, stock: Criterion) -> None:
    """The same ids and, within rounding, the same scores, call by call."""
    assert len(ours.ids) == len(stock.ids)
    assert all(torch.equal(a, b) for a, b in zip(ours.ids, stock.ids, strict=True))
    for a, b in zip(ours.scores, stock.scores, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a[0] == b[0]
            assert torch.allclose(a[1], b[1], **ROUNDING)


@pytest.mark.parametrize("eos", [None, [5, 6, 7]], ids=["endless", "ends"])
@pytest.mark.parametrize("returned", [{}, SCORED], ids=["ids", "scores"])
@pytest.mark.parametrize("make", [Criterion, Counting, SingleRows, Sure, AcrossRows])
def test_criteria_are_called_as_by_stock(
    make: Callable[[], Criterion],
    returned: dict[str, Any],
    eos: list[int] | None,
    call: Call,
) -> None:
    options = {"fresh": lambda: {"stopping_criteria": [make()]}, "eos_token_id": eos, **returned}
    both = run_both(tiny_model(), call.inputs, drafts=False, **options, **call.options)
    assert_same_calls(*(x["stopping_criteria"][0] for x in (both.our_extras, both.stock_extras)))
    assert both.stats.disabled_reason is None


def test_criteria_stop_inside_an_accepted_path(call: Call) -> None:
    model, inputs = tiny_model("gemma3"), call.inputs
    spec = knowing(run(model, inputs, **call.options).ids, inputs, max_nodes=32)
    for make in (Counting, SingleRows):
        fresh = {"fresh": lambda make=make: {"stopping_criteria": [make()]}}
        both = run_both(model, inputs, spec, **fresh, **call.options)
        assert both.ours.ids.shape[1] < NUM_COLUMNS + 30


@pytest.mark.parametrize("num_rows", [1, 3])
def test_hours_left(num_rows: int) -> None:
    for options in MODES.values():
        run_both(tiny_model(), prompt(num_rows), max_time=1e5, eos_token_id=[5, 6], **options)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_time_left(num_rows: int) -> None:
    """Stock stops behind the first token, whatever the clock says."""
    both = run_both(tiny_model(), prompt(num_rows), max_time=-1.0, drafts=False)
    assert both.ours.ids.shape[1] == NUM_COLUMNS + 1


@pytest.mark.parametrize(
    "criteria",
    [
        [MaxLengthCriteria(30), MaxLengthCriteria(20)],
        [MaxLengthCriteria(90)],
        [MaxLengthCriteria(3)],
        [EosTokenCriteria(torch.tensor(5)), EosTokenCriteria([6, 7])],
        [MaxLengthCriteria(21), EosTokenCriteria(torch.tensor([[5], [6]])), MaxLengthCriteria(25)],
    ],
)
def test_several_of_a_kind(criteria: list[StoppingCriteria], call: Call) -> None:
    """Each counts, and together they replace the one that the call's config stands for."""
    asked = {"stopping_criteria": StoppingCriteriaList(criteria), "eos_token_id": [8, 9]}
    both = run_both(tiny_model(), call.inputs, drafts=False, **asked, **call.options)
    assert both.stats.disabled_reason is None

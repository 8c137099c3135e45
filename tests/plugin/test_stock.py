"""The candidate generator keeps to the length that a criterion of the caller's names."""

from __future__ import annotations

import pytest
from transformers import MaxLengthCriteria, StoppingCriteriaList

from selfspec import SelfSpec, SelfSpecCandidateGenerator
from tests.fakes import FutureSource, new_model, prompt
from tests.lossless.same import GREEDY, NUM_COLUMNS, assert_same_ids, run, texts_of


@pytest.mark.parametrize("num_new", [7, 30])
def test_a_criterion_of_the_callers_names_the_length(num_new: int) -> None:
    model, inputs = new_model("llama"), prompt()
    options = {**GREEDY, "max_new_tokens": 20}
    criteria = StoppingCriteriaList([MaxLengthCriteria(NUM_COLUMNS + num_new)])
    stock = run(model, inputs, stopping_criteria=criteria, **options)
    (text,) = texts_of(stock.ids, inputs)
    spec = SelfSpec(extra_sources=[FutureSource([[*text, *[5] * 20]])])
    with SelfSpecCandidateGenerator(spec).plugged_into(model):
        lookup = {"prompt_lookup_num_tokens": 10, "stopping_criteria": criteria}
        ours = run(model, inputs, **lookup, **options)
    length = min(stock.ids.shape[1], ours.ids.shape[1])
    assert_same_ids(ours.ids[:, :length], stock.ids[:, :length])
    assert ours.ids.shape[1] <= NUM_COLUMNS + num_new

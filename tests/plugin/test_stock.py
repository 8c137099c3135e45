"""The candidate generator keeps to the length that a criterion of the caller's names."""

from __future__ import annotations

import pytest
from transformers import MaxLengthCriteria, StoppingCriteriaList

from selfspec import SelfSpec, SelfSpecCandidateGenerator
from selfspec.errors import UnsupportedError
from tests.fakes import FutureSource, new_model, prompt
from tests.lossless.same import GREEDY, NUM_COLUMNS, assert_same_ids, run, texts_of


def test_a_criterion_of_the_callers_names_the_length() -> None:
    model, inputs = new_model("llama"), prompt()
    (text,) = texts_of(run(model, inputs, **GREEDY).ids, inputs)
    criteria = StoppingCriteriaList([MaxLengthCriteria(NUM_COLUMNS + 7)])
    stock = run(model, inputs, stopping_criteria=criteria, **GREEDY)
    spec = SelfSpec(extra_sources=[FutureSource([text])])
    with SelfSpecCandidateGenerator(spec).plugged_into(model):
        options = {"prompt_lookup_num_tokens": 10, "stopping_criteria": criteria, **GREEDY}
        assert_same_ids(run(model, inputs, **options).ids, stock.ids)


def test_a_criterion_beyond_the_config_is_refused_since_stock_would_never_end() -> None:
    model, inputs = new_model("llama"), prompt()
    criteria = [MaxLengthCriteria(NUM_COLUMNS + 8)]
    options = {"prompt_lookup_num_tokens": 10, "max_new_tokens": 7, "stopping_criteria": criteria}
    ours = SelfSpecCandidateGenerator(SelfSpec()).plugged_into(model)
    with ours, pytest.raises(UnsupportedError, match="MaxLengthCriteria"):
        run(model, inputs, do_sample=False, **options)

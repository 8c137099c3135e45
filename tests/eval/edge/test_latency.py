"""The seconds of both stages of a batch's step."""

from __future__ import annotations

import numpy as np
import pytest

from eval.edge.latency import Coefficients, Latency, Stage
from eval.errors import EvalError

TRUE = Stage(Coefficients(fixed=0.02, row=0.003, query=0.002), horizon=2000)


def test_tables_draft_in_one_pass_and_a_model_in_one_forward_for_each_token():
    stage = Stage(Coefficients(0.5, 0.0, 0.25))
    tables, model = Latency(TRUE, stage), Latency(TRUE, stage, by_model=True)
    lengths = np.array([0, 1, 4])
    assert tables.draft_s(2, lengths, 9).tolist() == [0, 1.0, 2.5]
    assert model.draft_s(2, lengths, 9).tolist() == [0, 1.0, 4.0]
    assert float(tables.draft_reading_s(1, 100)) == 0
    assert float(model.draft_reading_s(1, 100)) == pytest.approx(25.5)
    assert Latency(TRUE).draft_s(2, lengths, 9).tolist() == [0, 0, 0]
    assert float(tables.verify_s(2, 3, 9)) == float(TRUE.seconds(2, 4, 9))


@pytest.mark.parametrize("values", [(-1, 0, 1), (0, 0, 0), (1, float("inf"), 0)])
def test_coefficients_that_can_not_be_are_refused(values):
    with pytest.raises(EvalError, match="coefficients"):
        Stage(Coefficients(*values))

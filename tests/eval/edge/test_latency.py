"""The seconds of both stages of a batch's step."""

from __future__ import annotations

import numpy as np
import pytest

from eval.edge.latency import Coefficients, Latency, Stage
from eval.errors import EvalError

TRUE = Stage(Coefficients(fixed=0.02, row=0.003, query=0.002), horizon=2000)


def test_a_draft_takes_a_forward_for_each_token():
    model = Latency(TRUE, Stage(Coefficients(0.5, 0.0, 0.25)))
    lengths = np.array([0, 1, 4])
    assert model.draft_s(2, lengths, 9).tolist() == [0, 1.0, 4.0]
    assert float(model.draft_reading_s(1, 100)) == pytest.approx(25.5)
    assert Latency(TRUE).draft_s(2, lengths, 9).tolist() == [0, 0, 0]
    assert float(model.verify_s(2, 3, 9)) == float(TRUE.seconds(2, 4, 9))


@pytest.mark.parametrize("values", [(-1, 0, 1), (0, 0, 0), (1, float("inf"), 0)])
def test_coefficients_that_can_not_be_are_refused(values):
    with pytest.raises(EvalError, match="coefficients"):
        Stage(Coefficients(*values))

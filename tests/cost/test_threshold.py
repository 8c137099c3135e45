"""EdgeLLM's threshold moves as the paper says, and stays within its bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.cost.threshold import AdaptiveThreshold


def test_the_paper_s_rule():
    threshold = AdaptiveThreshold(0.08)
    threshold.observe(4, 4, 0.3)
    assert threshold.value == pytest.approx(0.04)
    threshold.observe(4, 1, 0.25)
    assert threshold.value == pytest.approx(0.04 / 0.25**0.75)
    threshold.observe(0, 0, 1.0)
    assert threshold.value == pytest.approx(0.04 / 0.25**0.75)


@given(
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.floats(0, 1)), max_size=60),
)
def test_it_stays_between_0_and_1(start, paths):
    threshold = AdaptiveThreshold(start)
    for num_drafted, num_correct, confidence in paths:
        before = threshold.value
        threshold.observe(num_drafted, min(num_correct, num_drafted), confidence)
        assert 0 < threshold.value < 1
        if 0 < num_drafted <= num_correct:
            assert threshold.value <= before
        else:
            assert threshold.value >= before

"""The best width is the best of all widths, and stopping early never loses it."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.cost import CostCurve, WidthSearch, best_width
from tests.oracles import token_rates

probabilities = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
score_lists = st.lists(probabilities, max_size=24)
falling = score_lists.map(lambda scores: sorted(scores, reverse=True))
# flat stretches and cliffs, so that the best width may lie behind many that do not pay
rises = st.sampled_from([0.0, 0.1, 0.5, 3.0])
points = st.dictionaries(st.integers(2, 24), rises, max_size=8).map(
    lambda rise: dict(zip([1, *sorted(rise)], accumulate(rise.values(), initial=1.0), strict=True))
)
curves = st.builds(CostCurve, points)


def grown(search: WidthSearch, scores: list[float]) -> WidthSearch:
    for score in scores:
        if not search.take(score):
            break
    return search


# -- the best width ----------------------------------------------------------------------------


@given(st.lists(score_lists, min_size=1, max_size=4), curves, st.integers(1, 30))
def test_the_best_width_is_the_best_of_all(scores, curve, max_nodes):
    choice = best_width(scores, curve, max_nodes)
    rates = token_rates(scores, curve.seconds, max_nodes)
    assert choice.rate == pytest.approx(max(rates))
    assert choice.rate == pytest.approx(rates[choice.width - 1])
    clearly_less = [rate for rate in rates[: choice.width - 1] if rate < choice.rate]
    assert len(clearly_less) == choice.width - 1


# -- found while growing -----------------------------------------------------------------------


@given(falling, curves, st.integers(1, 30))
def test_stopping_early_finds_what_all_scores_would(scores, curve, max_nodes):
    search = grown(WidthSearch(curve, max_nodes), scores)
    choice = best_width([scores], curve, max_nodes)
    assert search.best.rate == pytest.approx(choice.rate)
    assert search.best.width <= search.num_nodes <= max_nodes
    rates = token_rates([scores], curve.seconds, max_nodes)
    assert rates[search.best.width - 1] == pytest.approx(max(rates))


@given(falling, curves, st.integers(1, 30))
def test_no_node_is_refused_while_equal_ones_behind_it_could_pay(scores, curve, most):
    """A refusal is right, and so is an acceptance: with scores no lower than this, more pays."""
    search = WidthSearch(curve, most)
    taken: list[float] = []
    for score in scores:
        best = search.best.rate
        rates = token_rates([taken + [score] * most], curve.seconds, most)
        could = max(rates[len(taken) + 1 :], default=0.0)
        took = search.take(score)
        if could > best * (1 + 1e-9):
            assert took
        if could < best * (1 - 1e-9):
            assert not took
        if not took:
            break
        taken.append(score)

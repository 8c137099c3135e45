"""How far two lists agree."""

from hypothesis import given
from hypothesis import strategies as st

from selfspec.cli.shared.prefix import first_difference, shared_length

IDS = st.lists(st.integers(0, 1), max_size=6)


@given(IDS, IDS)
def test_the_shared_prefix_is_shared_and_the_longest(left, right):
    length = shared_length(left, right)
    assert left[:length] == right[:length]
    assert left[: length + 1] != right[: length + 1] or left == right


@given(IDS, IDS)
def test_a_difference_is_none_only_between_equals(left, right):
    assert (first_difference(left, right) is None) == (left == right)

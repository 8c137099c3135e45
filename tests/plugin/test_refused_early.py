"""What can't work is refused when it is made, with the fix, and not in the first call."""

import pytest

from selfspec import SelfSpec
from selfspec.errors import ConfigError
from tests.fakes import FutureSource


class OldSource(FutureSource):
    """As sources were written for version 0.1."""

    observe_pairs = None


def test_a_source_without_a_method_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"without observe_pairs\(\).*was named observe_places"):
        SelfSpec(extra_sources=[OldSource([[1]])])

"""What can't work is refused when it is made, with the fix, and not in the first call."""

import pytest
import torch

from selfspec import SelfSpec
from selfspec.errors import ConfigError, UnsupportedError
from tests.fakes import FutureSource, attached_model, prompt


class OldSource(FutureSource):
    """As sources were written for version 0.1."""

    observe_pairs = None


def test_a_source_without_a_method_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"without observe_pairs\(\).*was named observe_places"):
        SelfSpec(extra_sources=[OldSource([[1]])])


def test_a_prediction_for_nobody():
    """Stock would say that the model does not use an argument of this name."""
    with pytest.raises(UnsupportedError, match=r"prediction= needs assistant= beside it"):
        attached_model().generate(**prompt(), prediction=[1, 2], max_new_tokens=4)


def test_a_prompt_without_a_token():
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="the prompt must have at least one token"):
        attached_model().generate(input_ids=empty, assistant=SelfSpec(), max_new_tokens=4)

"""The census says how a family is served."""

from __future__ import annotations

import pytest

from eval.families.trial import Verdict, verdict


@pytest.mark.parametrize(
    ("family", "served", "prompt"),
    [("llama", "trees", "text"), ("qwen2_vl", "trees", "image"), ("git", "plain", "image")],
)
def test_a_family_is_tried_with_what_it_takes(family: str, served: str, prompt: str) -> None:
    found = verdict(family)

    assert (found.served, found.prompt) == (served, prompt)


def test_a_family_that_is_not_there_is_not_made() -> None:
    assert verdict("no_such_family") == Verdict(
        "no_such_family", "not made", reason="KeyError: 'no_such_family'"
    )

"""The census says how a family is served, and what could not be tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.census import page
from eval.families import trial
from eval.families.trial import Verdict, verdict


@pytest.mark.parametrize(
    ("family", "served", "prompt"),
    [
        ("qwen2_vl", "trees", "image"),
        ("bloom", "chains", "text"),
        ("t5", "chains", "text"),
        ("git", "plain", "image"),
    ],
)
def test_a_family_is_tried_with_what_it_takes(family: str, served: str, prompt: str) -> None:
    found = verdict(family)

    assert (found.served, found.prompt) == (served, prompt)
    assert found.ways["batch"] == found.ways["three"] == served


def test_a_family_that_is_not_there_is_not_made() -> None:
    assert verdict("no_such_family").served == "not made"


def test_an_image_that_can_not_be_made_is_a_verdict_of_its_own(monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such image")

    monkeypatch.setattr(trial, "_check_seen", fail)

    found = verdict("llava")

    assert (found.served, found.prompt) == ("image not made", "text")
    assert found.reason == "image: ValueError: no such image; text alone: trees"


def test_another_text_than_stocks_is_a_fault(monkeypatch: Any) -> None:
    own = trial._generate

    def other(model: Any, inputs: Any, options: dict[str, Any], **ours: Any) -> torch.Tensor:
        return own(model, inputs, options, **ours) + ("assistant" in ours)

    monkeypatch.setattr(trial, "_generate", other)

    found = verdict("llama")

    assert found.served == "wrong text"
    assert found.reason.startswith("greedy: ")


def test_drafts_that_are_never_right_prove_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(trial, "_overlap", lambda *_: 0)

    found = verdict("llama")

    assert found.served == "no draft accepted"
    assert found.reason.startswith("greedy: tree, ")


def test_the_page_names_all_families_with_the_same_reason_in_one_line() -> None:
    plain = [Verdict(name, "plain", reason=f"{name} takes no ids") for name in ("OneLM", "TwoLM")]

    text = page([*plain, Verdict("llava", "trees", "image")])

    assert "## Trees (1)" in text
    assert "- With image: `llava`" in text
    assert "- With text: takes no ids: `OneLM`, `TwoLM`" in text

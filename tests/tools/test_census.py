"""The census says how a family is served, and what could not be tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.census import KEPT, PAGE, page, read_verdicts
from tools.census_families import trial
from tools.census_families.trial import verdict


@pytest.mark.parametrize(
    ("family", "served", "prompt"),
    [
        *(("qwen2_vl", "trees", "image"), ("git", "plain", "image")),
        *(("bloom", "chains", "text"), ("t5", "chains", "text")),
    ],
)
def test_a_family_is_tried_with_what_it_takes(family: str, served: str, prompt: str) -> None:
    found = verdict(family)
    assert (found.served, found.prompt) == (served, prompt)
    assert found.ways["batch"] == found.ways["three"] == served


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("no such image")


def other_text(model: Any, inputs: Any, options: dict[str, Any], **ours: Any) -> torch.Tensor:
    return GENERATE(model, inputs, options, **ours) + ("assistant" in ours)


GENERATE = trial._generate


@pytest.mark.parametrize(
    ("family", "broken", "served", "reason"),
    [
        ("no_such_family", {}, "not made", ""),
        ("llava", {"_check_seen": fail}, "image not made", "image: ValueError: no such image; "),
        ("llama", {"_generate": other_text}, "wrong text", "greedy: "),
        ("llama", {"_overlap": lambda *_: 0}, "no draft accepted", "greedy: tree, "),
    ],
)
def test_what_proves_nothing_is_a_verdict_of_its_own(
    family: str, broken: dict[str, Any], served: str, reason: str, monkeypatch: Any
) -> None:
    for name, instead in broken.items():
        monkeypatch.setattr(trial, name, instead)
    found = verdict(family)
    assert found.served == served
    assert found.reason.startswith(reason)


def test_the_table_of_all_families_is_made_of_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith("\n" + page(read_verdicts(KEPT), "5.24.0"))

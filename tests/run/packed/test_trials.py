"""A trial tells which way is faster and by how much; what it found is kept for the next process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.machine.measured import keep_measured
from selfspec.run.packed import trials
from selfspec.run.packed.linears import own_linear
from selfspec.run.packed.trials import WIDTHS, Kind, Trial, glance, known_trial, trial
from tests.fakes import packs_here

pytestmark = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")
KIND = Kind(24, 16, torch.float32)


@pytest.fixture
def weights() -> list[torch.Tensor]:
    return list(torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def clocked(monkeypatch: pytest.MonkeyPatch, share: dict[int, float]) -> None:
    """Packed products take these shares of the own ones' second."""

    def seconds(products: list[Any], x: torch.Tensor) -> float:
        return 1.0 if products[0].func is own_linear else share[len(x)]

    monkeypatch.setattr(trials, "_seconds", seconds)


def test_a_trial_runs_here_and_draws_nothing(weights: list[torch.Tensor]) -> None:
    before = torch.get_rng_state()
    found = trial(KIND, weights)
    assert set(found.own) == set(WIDTHS)
    assert found.way in ("same", None)
    assert known_trial(KIND) == found
    assert torch.equal(before, torch.get_rng_state())
    assert set(glance(weights[0])) == set(WIDTHS)


@pytest.mark.parametrize(
    ("shares", "way", "least", "most"),
    [
        ((0.5, 0.5, 0.5, 0.5), "same", 1, None),
        ((0.95, 0.95, 0.95, 0.5), None, 0, None),
        ((1.5, 0.9, 0.3, 0.3), "same", 4, None),  # a single token is faster as it is
        ((1.5, 1.5, 0.4, 0.4), "same", 10, None),
        ((0.8, 0.8, 0.8, 1.2), "same", 1, 16),  # and so is a prompt
    ],
)
def test_copies_are_used_for_as_many_tokens_as_they_are_faster_for(
    shares: tuple[float, ...],
    way: str | None,
    least: int,
    most: int | None,
    weights: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked(monkeypatch, dict(zip(WIDTHS, shares, strict=True)))
    found = trial(KIND, weights)
    assert found.way == way
    if way is not None:
        assert (found.least_tokens, found.most_tokens) == (least, most)
        best = [found.best()[width] for width in WIDTHS]
        assert best == pytest.approx([min(share, 1) / 3 for share in shares])


def test_a_large_layer_is_tried_in_part(
    weights: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked(monkeypatch, dict.fromkeys(WIDTHS, 0.5))
    monkeypatch.setattr(trials, "_MOST_WEIGHTS", 16 * 8)
    assert trial(KIND, weights).own[1] == 3.0  # A third of it took a second.


@pytest.mark.parametrize(
    "damage",
    [
        {"own": 3},
        {"own": {"1": 1.0}},
        {"way": "other"},
        {"packed": {}},
        {"packing": float("inf")},
        {"packed": {"1": -1.0, "4": 1.0, "16": 1.0, "64": 1.0}},
    ],
)
def test_what_is_damaged_on_disk_counts_as_missing(damage: Any) -> None:
    times = dict.fromkeys(map(str, WIDTHS), 1.0)
    sound = {"own": times, "way": "same", "packed": times, "packing": 1.0}
    keep_measured([(trials._key(KIND), sound)])
    assert known_trial(KIND) == Trial(
        dict.fromkeys(WIDTHS, 1.0), "same", dict.fromkeys(WIDTHS, 1.0), 1.0
    )
    keep_measured([(trials._key(KIND), damage)])
    assert known_trial(KIND) is None

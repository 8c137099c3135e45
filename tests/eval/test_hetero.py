"""A layer that two units share is the plain layer, and a split follows the speeds of both."""

from __future__ import annotations

import json
import os

import pytest
import torch

from eval import hetero
from eval.models.shapes import GrownShape
from eval.units import shares
from eval.units.layer import KINDS, ByRows, Layer, Shared
from eval.units.unit import two_units

SMALL = GrownShape(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=96,
    head_dim=8,
)
needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two units need two cores to be pinned to",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hetero, "named_shape", lambda _name: SMALL)
    monkeypatch.setattr(shares, "_ROUNDS", 2)


WAYS = {
    **{f"share {n}": (n, None) for n in (0.0, 0.3, 1.0)},
    **{f"boundary {n}": (0.5, n) for n in (1, 7, 20)},  # of attention
    "by rows": None,
}


@needs_cores
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_shared_layer_is_the_plain_layer(way: tuple[float, int | None] | None) -> None:
    layer = Layer.random(SMALL, num_columns=20, width=6)
    x = torch.randn(6, SMALL.hidden_size)
    with two_units("cpu") as units:
        shared = (
            ByRows(layer, units, 0.3)
            if way is None
            else Shared(layer, units, dict.fromkeys(KINDS, way[0]), way[1])
        )
        found = shared(x)
    torch.testing.assert_close(found, layer.plain(x), rtol=1e-5, atol=1e-5)


@needs_cores
def test_a_whole_model_on_two_units(figures, chat_folder) -> None:
    """All ways give the model's own logits."""
    options = ["--model", chat_folder, "--columns", "20", "--width", "4", "16", "--rounds", "1"]
    rows = figures("hetero", *options)["rows"]
    assert [row["width"] for row in rows] == [1, 4, 16]
    assert set(rows[1]["ms"]) == {"one unit", "by rows", "by columns"}
    assert max(row["difference"] for row in rows) < 1e-4


@needs_cores
def test_attention_by_its_boundary(figures) -> None:
    options = ["--boundary", "--columns", "20", "--width", "6", "--rounds", "1"]
    (row,) = figures("hetero", *options)["rows"]
    assert row["dynamic"] <= row["static"]


@needs_cores
def test_hetero(figures, tmp_path) -> None:
    out = tmp_path / "hetero.json"
    options = ["--columns", "20", "--width", "6", "--rounds", "2", "--out", str(out)]
    told = figures("hetero", *options)
    assert told == json.loads(out.read_text())
    rows = {row["way"]: row for row in told["rows"]}
    assert len(rows) == 6
    assert rows["first unit alone"]["shares"]["down"] == 1
    assert 0 < rows["profiled under contention"]["shares"]["down"] < 1


def test_all_ways_of_attention_agree(figures) -> None:
    options = ["--attention", "--columns", "20", "--width", "1", "6", "--rounds", "1"]
    rows = figures("hetero", *options)["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"] * 2
    for row in rows:
        assert row["difference"] < (1e-5 if row["dtype"] == "float32" else 0.03)

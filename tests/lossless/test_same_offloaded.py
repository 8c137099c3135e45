"""Models that accelerate offloads, to memory or to disk: the same ids, with trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec import SelfSpec, attach
from tests.fakes import prompt
from tests.lossless.same import FIXED, GREEDY, MODES, assert_same_ids, doubting, run, slow
from tests.streamed import saved_model

MAPS: dict[str, dict[str, str]] = {
    "some layers on disk": {
        "model.embed_tokens": "cpu",
        **{f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(6)},
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "all on disk": {"": "disk"},
}


def offloaded(folder: Path, where: str) -> Any:
    """The model of a folder with parts of it on disk."""
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=MAPS[where], offload_folder=folder / "offloaded"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("name", ["llama", slow("mixtral")])
def test_trees_over_weights_on_disk(name: str, where: str, mode: str, tmp_path: Path) -> None:
    inputs = prompt(3 if mode == "sample" else 1)
    stock = run(saved_model(tmp_path, name), inputs, **MODES[mode])
    model = attach(offloaded(tmp_path, where))
    assert_same_ids(run(model, inputs, **MODES[mode]).ids, stock.ids)
    spec = doubting(stock.ids, inputs, **FIXED)
    ours = run(model, inputs, assistant=spec, **MODES[mode])
    assert_same_ids(ours.ids, stock.ids)
    assert torch.equal(ours.rng_state, stock.rng_state)
    assert spec.stats.disabled_reason is None
    assert spec.ability(model).mode == "tree"
    assert sum(n * times for n, times in spec.stats.accepted_lengths.items()) > 5


def test_costs_are_kept_apart(measuring: None, tmp_path: Path) -> None:
    """What a forward costs in memory says nothing about one that reads from disk."""
    model = saved_model(tmp_path)
    found = []
    for each in (model, offloaded(tmp_path, "some layers on disk")):
        spec = SelfSpec()
        run(each, prompt(), custom_generate=spec, **GREEDY)
        found.append({key["weights in"] for key, _ in spec.forwards.costs._curves.values()})
    assert found == [{"cpu"}, {"7 on cpu, 3 on disk"}]

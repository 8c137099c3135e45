"""`selfspec.load()`: the ids of the model that transformers loads, packed in place or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from selfspec import SelfSpec, load
from selfspec.weights import is_packed_in_place
from tests.fakes import packs_here, prompt
from tests.lossless.same import GREEDY, Call, assert_same_ids, doubting, run, run_both
from tests.streamed import saved_model

pytestmark = [
    pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights"),
    pytest.mark.usefixtures("packs_at_once"),
]
SHORTLY: dict[str, Any] = {**GREEDY, "max_new_tokens": 8}
TIED = {"tie_word_embeddings": True}
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "llama, tied": TIED, "qwen2": {}, "bloom": {}}


def packed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that hold their weights in packed form alone."""
    return [module for module in model.modules() if is_packed_in_place(module)]


def loaded(folder: Path, kind: str = "llama", **options: Any) -> tuple[Any, Any]:
    """The model of transformers, and ours, which is packed in place."""
    model = saved_model(folder, kind.partition(",")[0], **KINDS[kind])
    ours = load(str(folder), **options)
    run(ours, prompt(), assistant=SelfSpec(), **SHORTLY)
    assert packed_layers(ours)
    return model, ours


@pytest.mark.parametrize("kind", KINDS)
def test_plain_and_with_drafts(kind: str, call: Call, tmp_path: Path) -> None:
    model, ours = loaded(tmp_path, kind)
    stock = run(model, call.inputs, **call.options)
    spec = doubting(stock.ids, call.inputs)
    both = run_both(ours, call.inputs, spec, drafts=kind != "bloom", **call.options)
    assert_same_ids(both.stock.ids, stock.ids)
    assert both.stats.forward == "packed"
    assert packed_layers(ours)


def test_a_head_that_shares_its_weight_is_packed_unless_memory_is_limited(tmp_path: Path) -> None:
    for limit, is_packed in ((None, True), ("100%", False)):
        _, ours = loaded(tmp_path, "llama, tied", max_memory=limit)
        assert is_packed_in_place(ours.lm_head) == is_packed
        assert ours.lm_head.weight is ours.get_input_embeddings().weight


# All of them are tried with copies beside weights; here, one of each kind of write.


def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    _, ours = loaded(tmp_path)
    ours.save_pretrained(tmp_path / "again")
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "model.safetensors").read_bytes()

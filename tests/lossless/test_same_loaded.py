"""`selfspec.load()`: the ids of the model that transformers loads, packed in place or not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from selfspec import SelfSpec, load
from selfspec.weights.packing import is_packed_in_place
from tests.fakes import packs_here, prompt
from tests.lossless.same import FIXED, GREEDY, Call, assert_same_ids, doubting, run, run_both
from tests.lossless.test_same_entrances import PEFT_NOTE
from tests.lossless.test_same_packed import EDITS, Edit
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


def test_every_loop_sees_that_it_is_packed(tmp_path: Path) -> None:
    model, ours = loaded(tmp_path)
    stock = run(model, prompt(), **GREEDY).ids
    for spec in (SelfSpec(**FIXED), SelfSpec(forward="eager"), SelfSpec()):
        assert_same_ids(run(ours, prompt(), assistant=spec, **GREEDY).ids, stock)
        assert spec.stats.forward == "packed"


def trained(model: Any) -> None:
    model.requires_grad_(True)
    model(**prompt()).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.model.layers.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.01 * weight.grad


def with_a_gradient_at_the_input(model: Any) -> None:
    """As adapters and prompts that are learned have it."""
    embedded = model.get_input_embeddings()(prompt()["input_ids"]).detach().requires_grad_(True)
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.abs().sum() > 0


def under_autocast(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(**prompt())


def with_an_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    run(model, prompt(), **SHORTLY)
    assert wrapped.merge_and_unload() is model


def read(model: Any) -> None:
    assert model.model.layers[1].mlp.down_proj.weight.isfinite().all()


WORK: dict[str, Callable[[Any], Any]] = {
    "read": read,
    "saved": lambda model: model.state_dict(),
    "pickled": lambda model: torch.save(model, io.BytesIO()),
    "cast": lambda model: model.to(torch.bfloat16).float(),
    "copied": lambda model: model.load_state_dict(copy.deepcopy(model).state_dict()),
    "trained": trained,
    "with a gradient at the input": with_a_gradient_at_the_input,
    "under autocast": under_autocast,
    "with an adapter": with_an_adapter,
}


@pytest.mark.filterwarnings(PEFT_NOTE)
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_whoever_needs_weights_gets_them_back(work: Callable[[Any], Any], tmp_path: Path) -> None:
    model, ours = loaded(tmp_path)
    before = len(packed_layers(ours))
    for each in (model, ours):
        work(each)
    assert len(packed_layers(ours)) < before
    stock = run(model, prompt(), **SHORTLY).ids
    assert_same_ids(run(ours, prompt(), **SHORTLY).ids, stock)
    left = len(packed_layers(ours))
    for _ in range(2):
        assert_same_ids(run(ours, prompt(), assistant=SelfSpec(), **SHORTLY).ids, stock)
    assert len(packed_layers(ours)) == left  # They are not packed in place again.
    for name, weight in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight)


# All of them are tried with copies beside weights; here, one of each kind of write.
WRITES = ("pruned", "swapped", "scaled", "in bfloat16 and back", "resized", "tied")


@pytest.mark.parametrize("edit", [EDITS[name] for name in WRITES], ids=WRITES)
def test_an_edited_model(edit: Edit, tmp_path: Path) -> None:
    model, ours = loaded(tmp_path)
    for each in (model, ours):
        torch.manual_seed(3)
        edit(each, each.model.layers[0].mlp.down_proj)
    stock = run(model, prompt(), **SHORTLY).ids
    assert_same_ids(run(ours, prompt(), **SHORTLY).ids, stock)
    assert_same_ids(run(ours, prompt(), assistant=SelfSpec(), **SHORTLY).ids, stock)


def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    _, ours = loaded(tmp_path)
    ours.save_pretrained(tmp_path / "again")
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "model.safetensors").read_bytes()

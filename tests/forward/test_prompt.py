"""A prompt's last hidden states are kept for who asks, and stock's own logits are untouched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from selfspec.ability.probe import attention_for_trees
from selfspec.compat.generation import KV
from selfspec.errors import UnsupportedError
from selfspec.forward import prompt as prompt_module
from selfspec.forward.backends import TreeBackend
from selfspec.forward.columns import KVRow
from selfspec.forward.model import AttentionTypes
from selfspec.forward.prompt import PromptPlan, ReadSoFar, part_of, read_prompt
from tests.fakes import prompt, tiny_model


def plan_of(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> PromptPlan:
    mask = inputs["attention_mask"]
    arguments = {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "logits_to_keep": 1,
        "use_cache": True,
        KV: DynamicCache(config=model.config),
    }
    return PromptPlan(
        model=model,
        input_ids=inputs["input_ids"],
        arguments=arguments,
        generation_config=GenerationConfig(),
        **options,
    )


@torch.no_grad()
def read(model: Any, inputs: dict[str, torch.Tensor], *parts: int, num_states: int = 0) -> Any:
    """The prompt, read in parts of these sizes and then to its end."""
    plan, so_far = plan_of(model, inputs), ReadSoFar()
    for number in parts:
        assert read_prompt(plan, so_far, number, num_states=num_states) is None
        assert so_far.hidden is None or so_far.hidden.shape[1] <= num_states
    return read_prompt(plan, so_far, num_states=num_states)


def hooks(model: Any) -> int:
    return len(model.get_output_embeddings()._forward_pre_hooks)


@pytest.mark.parametrize("name", ["llama", "cohere"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_states", [0, 5, 64])
def test_the_last_states_are_kept_and_the_last_logits_are_stocks(
    name: str, num_rows: int, num_states: int
) -> None:
    """To the bit. Cohere scales what its head puts out."""
    model, inputs, seen = tiny_model(name), prompt(num_rows), []
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    stock = read(model, inputs).logits
    with torch.no_grad():
        positions = plan_of(model, inputs).arguments["position_ids"]
        model(**inputs, position_ids=positions)
    handle.remove()
    prefilled = read(model, inputs, num_states=num_states)
    assert torch.equal(prefilled.logits, stock)
    assert hooks(model) == 0
    if num_states:
        torch.testing.assert_close(prefilled.hidden, seen[1][:, -num_states:])
    else:
        assert prefilled.hidden is None


def test_the_hook_is_gone_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model(), []

    def broken(*_: Any) -> None:
        seen.append(hooks(model))
        raise KeyboardInterrupt

    monkeypatch.setattr(prompt_module, "prefill", broken)
    with pytest.raises(KeyboardInterrupt):
        read(model, prompt(), num_states=4)
    assert seen == [1]
    assert hooks(model) == 0


def test_another_threads_forward_passes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets all its logits, and its states are nobody's."""
    model, inputs, other, elsewhere = tiny_model(), prompt(seed=1), prompt(seed=2), []
    prefill = prompt_module.prefill

    @torch.no_grad()
    def run_other() -> None:
        elsewhere.append(model(**other).logits)

    def beside(*given: Any) -> Any:
        thread = threading.Thread(target=run_other)
        thread.start()
        thread.join()
        return prefill(*given)

    run_other()
    monkeypatch.setattr(prompt_module, "prefill", beside)
    prefilled = read(model, inputs, num_states=64)
    assert torch.equal(*elsewhere)
    assert prefilled.hidden.shape[:2] == inputs["input_ids"].shape


@pytest.mark.parametrize("num_states", [3, 64])
@pytest.mark.parametrize("parts", [(10,), (1, 4)])
def test_a_prompt_in_parts_shows_the_states_of_all_of_them(
    parts: tuple[int, ...], num_states: int
) -> None:
    model = tiny_model()
    whole = read(model, prompt(), num_states=num_states)
    in_parts = read(model, prompt(), *parts, num_states=num_states)
    torch.testing.assert_close(in_parts.hidden, whole.hidden)
    torch.testing.assert_close(in_parts.logits, whole.logits)


def test_a_part_sees_the_columns_in_front_of_it_alone() -> None:
    mask, positions = torch.ones(1, 9), torch.arange(9).expand(3, 1, 9)
    part = part_of({"attention_mask": mask, "position_ids": positions, "x": 1}, 4, 6)
    assert part["attention_mask"].shape == (1, 6)
    assert part["position_ids"][0, 0].tolist() == [4, 5]
    assert part["x"] == 1


def test_padding_is_refused_where_an_image_has_columns_and_no_ids() -> None:
    """Nobody would know which columns the mask is about."""
    model, inputs = tiny_model(), prompt(2)
    inputs["attention_mask"][1, :3] = 0
    prefilled = read(model, inputs)
    layer = prefilled.cache.layers[0]
    layer.keys, layer.values = (torch.cat([x[:, :, :1], x], 2) for x in (layer.keys, layer.values))
    attention = attention_for_trees(model)
    assert isinstance(attention, AttentionTypes)
    backend = TreeBackend(model, attention)
    with pytest.raises(UnsupportedError, match="must be its tokens"):
        backend.admit(prefilled, [KVRow(), KVRow()], [], max_new_columns=4, max_tree=4)

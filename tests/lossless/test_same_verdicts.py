"""What a model can verify depends on its state now: hooks, adapters, modes, who waits for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from peft import PeftModel

from selfspec import SelfSpec, UnsupportedError, attach, generate_many
from tests.batch.test_generate_many import assert_as_alone, prompts
from tests.fakes import new_model, prompt, tiny_tokenizer, with_lora
from tests.lossless.same import FIXED, GREEDY, run_both, slow
from tests.lossless.test_same_entrances import PEFT_NOTE

# adapters


def adapted(**changes: Any) -> PeftModel:
    model = new_model(eos_token_id=list(range(3, 12)))
    return attach(with_lora(model, "one", "two", **{"task_type": None, **changes}))


def num_hooks(model: torch.nn.Module) -> int:
    return sum(
        len(vars(m)[f"_forward{kind}_hooks"]) for m in model.modules() for kind in ("", "_pre")
    )


@pytest.mark.filterwarnings(PEFT_NOTE)
def test_adapters_by_row_are_decoded_plainly_and_spoil_no_later_call() -> None:
    model, spec = adapted(), SelfSpec(**FIXED)
    names = {"adapter_names": ["one", "two", "__base__"]}
    for extra in (names, {}, names, {}):
        options = {"drafts": False, "entrance": "assistant", **extra}
        run_both(model, prompt(3), spec, **options, **GREEDY)
        reason = spec.stats.disabled_reason
        assert ("adapters depend on the rows" in str(reason)) == bool(extra)
    assert num_hooks(model) == 0


@pytest.mark.filterwarnings(PEFT_NOTE)
@pytest.mark.parametrize("order", [1, -1])
def test_an_activated_lora_whether_it_is_off_or_on_at_first(order: int) -> None:
    model, spec = adapted(alora_invocation_tokens=[20, 21], task_type="CAUSAL_LM"), SelfSpec()
    off = torch.arange(30, 50)[None]
    on = torch.tensor([[30, 31, 20, 21, 40]])
    for ids in [off, on][::order] * 2:
        inputs = {"input_ids": ids}
        run_both(model, inputs, spec, drafts=False, entrance="assistant", **GREEDY)
    assert spec.support(model).mode == "tree"  # The model inside, without an adapter that is on.
    with pytest.raises(UnsupportedError, match="call generate\\(\\) for each prompt"):
        list(generate_many(model, tiny_tokenizer(), off.tolist(), max_new_tokens=9, **GREEDY))
    assert num_hooks(model) == 0


@pytest.mark.filterwarnings(PEFT_NOTE)
def test_many_prompts_on_a_wrapper_share_their_forwards() -> None:
    model, spec = adapted(), SelfSpec()
    assert_as_alone(model, prompts(), spec, max_new_tokens=9, **GREEDY)
    assert spec.total_stats.disabled_reason is None
    assert spec.total_stats.seconds["plain"] == 0


# several processes


@pytest.fixture
def process_group() -> Any:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_forwards_in_step_with_other_processes(process_group: None) -> None:
    model, spec = attach(new_model()), SelfSpec()
    options = {"synced_gpus": True, "drafts": False, "entrance": "assistant"}
    run_both(model, prompt(), spec, **options, **GREEDY)
    assert "synced_gpus=True" in spec.stats.disabled_reason
    run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert spec.stats.disabled_reason is None


def test_a_model_that_is_spread_over_processes() -> None:
    model, spec = new_model(), SelfSpec()
    model._device_mesh = object()
    run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert "spread over several processes" in spec.stats.disabled_reason


# the rest


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_after_the_first_call() -> None:
    model, spec = new_model().train(), SelfSpec(**FIXED)
    run_both(model, prompt(), spec, drafts=False, **GREEDY)
    model.gradient_checkpointing_enable()
    run_both(model, prompt(), spec, drafts=False, **GREEDY)


def test_a_processor_that_wants_ids_in_one_piece_of_memory() -> None:
    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.view(-1).numel() == ids.numel()
        return scores

    run_both(new_model(), prompt(3), logits_processor=[process], **GREEDY)


def doubling(_module: Any, _args: Any, output: Any) -> None:
    output.mul_(2)


def edits(model: PeftModel, dice: random.Random, handles: list[Any]) -> None:
    """One random change of a model's state."""
    inner = model.get_base_model()
    layer, change = dice.choice(inner.model.layers), dice.randrange(7)
    if change < 2 and handles:
        handles.pop(dice.randrange(len(handles))).remove()
    elif change < 3:
        handles.append(layer.register_forward_hook(doubling))
    elif change < 4:
        model.set_adapter(dice.choice(["one", "two"]))
    elif change < 5:
        is_merged = any(getattr(m, "merged_adapters", None) for m in model.modules())
        (model.unmerge_adapter if is_merged else model.merge_adapter)()
    elif change < 6:
        inner.train(not inner.training)
    else:
        inner.to(torch.float64 if inner.dtype == torch.float32 else torch.float32)


@pytest.mark.filterwarnings("ignore:Adapter cannot be set when the model is merged:UserWarning")
@pytest.mark.filterwarnings(PEFT_NOTE)
@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 20))])
def test_random_states_of_one_model(seed: int) -> None:
    dice, model, spec, handles = random.Random(seed), adapted(), SelfSpec(**FIXED), []
    for number in range(12):
        edits(model, dice, handles)
        num_rows = dice.randint(1, 3)
        extra = {}
        if dice.random() < 0.2 and not model.training:
            extra["adapter_names"] = [
                dice.choice(["one", "two", "__base__"]) for _ in range(num_rows)
            ]
        if any(getattr(m, "merged_adapters", None) for m in model.modules()):
            extra = {}
        options = {"drafts": False, "entrance": "assistant", **extra}
        inputs = prompt(num_rows, seed=number)
        run_both(model, inputs, spec, **options, **GREEDY)

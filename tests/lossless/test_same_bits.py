"""On a CPU that can't calculate in half precision, logits are stock's to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from selfspec import GenerationStats, products
from selfspec.native import attend, attends, project, projects
from selfspec.packed import settles
from selfspec.plugin import alone
from selfspec.plugin.turns import Turns
from selfspec.products import NATIVE, NUM_TOKENS, Products, Table
from tests.fakes import packs_here, prompt
from tests.lossless.same import FIXED, GREEDY, MODES, doubting, run
from tests.zoo import PAD, VOCAB

# such sizes as real models have: in others torch's code for activations rounds by place
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
CONFIGS = {
    "one key for two heads": LlamaConfig(**SIZES),
    "a key for each head": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "rows of an odd size": LlamaConfig(**{**SIZES, "intermediate_size": 96}),
    "a window": MistralConfig(**SIZES, sliding_window=8),
    "biases": Qwen2Config(**SIZES),
    "other projections": GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3, pad_token_id=PAD
    ),
}
HALVES = [torch.bfloat16, torch.float16]


def model_of(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    if not settles(dtype):
        pytest.skip(f"this CPU calculates in {dtype} by itself, or settles no sums")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(dtype).eval()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("forward", ["eager", "turned", "packed", "graph"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_logit(name: str, forward: str, num_rows: int, dtype: torch.dtype) -> None:
    compare_every_logit(name, forward, num_rows, dtype)


def compare_every_logit(
    name: str, forward: str, num_rows: int, dtype: torch.dtype
) -> GenerationStats:
    if forward == "packed" and not packs_here(dtype):
        pytest.skip("this build of torch packs no weights")
    model, inputs = model_of(CONFIGS[name], dtype), prompt(num_rows)
    options = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    stock = run(model, inputs, **options)
    spec = doubting(stock.ids, inputs, forward=forward, **FIXED)
    ours = run(model, inputs, custom_generate=spec, **options)
    assert spec.stats.rounding == "stock"
    assert spec.stats.num_nodes > spec.stats.num_steps
    pairs = zip(ours.output.logits, stock.output.logits, strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    return spec.stats


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_code_of_our_own_is_asked(
    name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, but nothing else is at hand."""
    if not (attends(torch.bfloat16, 16) and projects(torch.bfloat16, 64)):
        pytest.skip("here torch adds up in another order, or nothing can be compiled")
    widths, numbers = set(), set()

    def attend_natively(query: torch.Tensor, *others: Any) -> torch.Tensor:
        widths.add(query.shape[1])
        return attend(query, *others)

    def project_natively(x: torch.Tensor, *others: Any) -> torch.Tensor:
        numbers.add(x.shape[1])
        return project(x, *others)

    def all_native(_turns: Turns, found: Products, *_: Any, **__: Any) -> Table:
        return dict.fromkeys(found, (NATIVE,) * len(NUM_TOKENS))

    monkeypatch.setattr(alone, "attend", attend_natively)
    monkeypatch.setitem(products._WAYS, NATIVE, project_natively)
    monkeypatch.setattr(Turns, "table", all_native)
    stats = compare_every_logit(name, "turned", num_rows, torch.bfloat16)
    assert stats.forward == "native"
    are_hidden = num_rows > 1 or name == "a window"  # some keys: stock has a mask there
    assert (max(widths, default=0) > 1) != are_hidden
    assert max(numbers) > 1


@pytest.mark.parametrize("forward", ["eager", "turned"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_without_code_of_our_own(
    forward: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "attends", lambda _dtype, _dim: False)
    monkeypatch.setitem(products._WAYS, NATIVE, linear)
    compare_every_logit("one key for two heads", forward, 1, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_the_text_of_rows_at_their_own_pace(mode: str, dtype: torch.dtype) -> None:
    model, inputs, options = (
        model_of(CONFIGS["one key for two heads"], dtype),
        prompt(3),
        MODES[mode],
    )
    stock = run(model, inputs, **options)
    spec = doubting(stock.ids, inputs, **FIXED)
    ours = run(model, inputs, custom_generate=spec, **options)
    assert spec.stats.rounding == "stock"
    assert torch.equal(ours.ids, stock.ids)
    assert torch.equal(ours.rng_state, stock.rng_state)


def test_free_it_keeps_to_near_ties() -> None:
    model, inputs = model_of(CONFIGS["one key for two heads"], torch.bfloat16), prompt()
    options = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    stock = run(model, inputs, **options)
    spec = doubting(stock.ids, inputs, rounding="free", **FIXED)
    ours = run(model, inputs, custom_generate=spec, **options)
    assert spec.stats.rounding == "free"
    first, other = stock.output.logits[0], ours.output.logits[0]
    torch.testing.assert_close(other, first, rtol=0.02, atol=0.02)


def test_with_another_attention_it_is_free() -> None:
    model, inputs = model_of(CONFIGS["one key for two heads"], torch.bfloat16), prompt()
    model.set_attn_implementation("eager")
    spec = doubting(run(model, inputs, **GREEDY).ids, inputs, **FIXED)
    run(model, inputs, custom_generate=spec, **GREEDY)
    assert spec.stats.rounding == "free"


def test_fp32_is_free() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["one key for two heads"]).eval()
    inputs = prompt()
    spec = doubting(run(model, inputs, **GREEDY).ids, inputs, **FIXED)
    run(model, inputs, custom_generate=spec, **GREEDY)
    assert spec.stats.rounding == "free"

"""What `return_dict_in_generate` brings: scores, logits and a KV cache as stock leaves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from selfspec.compat.generation import kv_of
from tests.fakes import prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    NUM_COLUMNS,
    ROUNDING,
    Call,
    assert_same_kv,
    knowing,
    run,
    run_both,
    slow,
)

EVERYTHING = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ENDS = [15, 26, 81]
NAMES = ("llama", "mistral", "gemma3", "llama4", "gpt2", "bloom")
OTHERS = ("qwen3-moe", "deepseek-v3", "gpt-oss", "gemma2", "starcoder2")


def assert_close(ours: Any, stock: Any) -> None:
    """The same number of steps, and each one's scores but for rounding; both may be None."""
    assert (ours is None) == (stock is None)
    if stock is None:
        return
    assert isinstance(ours, tuple)
    assert len(ours) == len(stock)
    for a, b in zip(ours, stock, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, **ROUNDING)


@pytest.mark.parametrize("eos", [None, ENDS], ids=["endless", "ends"])
@pytest.mark.parametrize("name", [*NAMES, *map(slow, OTHERS)])
def test_everything(name: str, eos: list[int] | None, call: Call) -> None:
    options = {"drafts": name not in ("bloom", *OTHERS), "eos_token_id": eos, **call.options}
    both = run_both(tiny_model(name), call.inputs, **EVERYTHING, **options)
    stock, ours = both.stock.output, both.ours.output
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert_close(ours.scores, stock.scores)
    assert_close(ours.logits, stock.logits)
    assert_same_kv(kv_of(ours), kv_of(stock))
    assert ours.stats == both.stats


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "asked",
    [(), ("output_scores",), ("output_logits",)],
    ids=lambda asked: "-".join(asked) or "kv",
)
def test_what_was_not_asked_for_is_none(asked: tuple[str, ...], num_rows: int) -> None:
    wanted = {"return_dict_in_generate": True, **dict.fromkeys(asked, True)}
    both = run_both(tiny_model(), prompt(num_rows), **wanted, **GREEDY)
    stock, ours = both.stock.output, both.ours.output
    assert_close(ours.scores, stock.scores)
    assert_close(ours.logits, stock.logits)
    assert_same_kv(kv_of(ours), kv_of(stock))
    assert ours.keys() == stock.keys()


def test_without_the_dict_the_flags_mean_nothing() -> None:
    both = run_both(tiny_model(), prompt(3), output_scores=True, output_logits=True, **GREEDY)
    assert isinstance(both.ours.output, torch.Tensor)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("length", [1, slow(2), 5, slow(9), 14, slow(33)])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_kv_is_cut_where_the_text_ends(name: str, length: int, num_rows: int) -> None:
    """An accepted path that runs past the limit leaves nothing behind."""
    model, inputs = tiny_model(name), prompt(num_rows)
    spec = knowing(run(model, inputs, **GREEDY).ids, inputs, max_nodes=12)
    options = {"max_new_tokens": length, "return_dict_in_generate": True, **GREEDY}
    both = run_both(model, inputs, spec, drafts=False, **options)
    kv = kv_of(both.ours.output)
    assert kv.get_seq_length() == NUM_COLUMNS + length - 1
    assert_same_kv(kv, kv_of(both.stock.output))

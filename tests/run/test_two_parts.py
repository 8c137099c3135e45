"""Attention in two parts is masked attention, copies no keys, and is used only where it pays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.integrations import sdpa_attention

from selfspec import SelfSpec, SpecConfig
from selfspec.compat.generation import KV
from selfspec.records import DraftTree
from selfspec.run import prepared, two_parts
from selfspec.run.backends import TreeBackend
from selfspec.run.prepared import Forwards
from selfspec.run.probe import attention_types
from selfspec.run.two_parts import Parts, TwoParts, in_two_parts
from tests.fakes import new_model, prompt, tiny_model
from tests.lossless.same import GREEDY, SAMPLE, doubting, run, run_both
from tests.split import use_two_parts

NUM_OPEN, NUM_NODES = 40, 5


def asked(dtype: torch.dtype, num_sharing: int = 3, rows: int = 2) -> Parts:
    """Scores of all sizes, and a mask under which the last node sees nothing but itself."""
    generator = torch.Generator().manual_seed(num_sharing)
    shape = (rows, 2, NUM_OPEN + NUM_NODES, 16)
    query, key, value = (4 * torch.randn(shape, generator=generator) for _ in range(3))
    hidden = torch.rand(rows, 1, NUM_NODES, NUM_NODES, generator=generator) < 0.5
    hidden[..., -1, :-1] = True
    hidden[..., range(NUM_NODES), range(NUM_NODES)] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    queries = query[:, :, : num_sharing * NUM_NODES]
    tensors = (tensor.to(dtype) for tensor in (queries, key, value))
    return Parts(*tensors, mask.repeat(1, 1, num_sharing, 1), scale=0.3)


def whole(parts: Parts) -> torch.Tensor:
    """The same by torch's own masked attention."""
    mask = torch.nn.functional.pad(parts.mask, (parts.num_open, 0))
    query, key, value = parts[:3]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=parts.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_parts_are_masked_attention(dtype: torch.dtype) -> None:
    parts = asked(dtype)
    found, expected = in_two_parts(parts), whole(parts)
    assert found.dtype is dtype
    rounding = 1e-5 if dtype is torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


def test_logits_are_those_of_masked_attention_and_no_keys_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    tree = DraftTree.of_root(5)
    for parent, token in ((0, 6), (0, 7), (2, 8), (3, 9)):
        tree.add(parent, token, 0.5)
    masked = tree_logits(model, tree)
    log = use_two_parts(monkeypatch)
    found = tree_logits(model, tree)
    torch.testing.assert_close(found, masked, rtol=1e-5, atol=1e-5)
    assert len(log) >= 2
    assert log[0].key.shape[1] == model.config.num_key_value_heads
    assert log[0].query.shape[2] == 2 * len(tree.tokens)


def tree_logits(model: Any, tree: DraftTree) -> torch.Tensor:
    """The logits of a tree, computed where copies of shared keys are forbidden."""
    cache, ids = DynamicCache(config=model.config), prompt()["input_ids"]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        model(input_ids=ids, **{KV: cache}, use_cache=True)
        position = torch.full((1, 1), ids.shape[1])
        types = attention_types(model.config)
        backend = TreeBackend(model, cache, types, position, None, room=16)
        patch.setattr(sdpa_attention, "repeat_kv", None)
        patch.setattr(torch.Tensor, "repeat_interleave", None)
        return backend.forward(backend.lay_out([tree]))


# How many layers are split in a step: those of full attention through sdpa. Windows that have
# passed the beginning of the text, chunks, the sinks of gpt-oss, and DeepSeek's values, which have
# another size than its keys, are left to masked attention.
SPLIT = {"llama": 2, "gemma3": 1, "llama4": 1, "gpt-oss": 0, "deepseek-v3": 0}


@pytest.mark.parametrize("mode", [GREEDY, SAMPLE], ids=["greedy", "sample"])
@pytest.mark.parametrize("name", SPLIT)
def test_the_text_is_stocks(name: str, mode: dict[str, Any], monkeypatch) -> None:
    model, inputs = tiny_model(name), prompt()
    stock = run(model, inputs, **mode)
    log = use_two_parts(monkeypatch)
    both = run_both(model, inputs, doubting(stock.ids, inputs), **mode)
    if SPLIT[name]:
        assert len(log) >= SPLIT[name] * (both.stats.num_steps - 1) > 0
    else:
        assert not log


def test_rows_with_holes_are_left_to_masked_attention(monkeypatch) -> None:
    log = use_two_parts(monkeypatch)
    run_both(tiny_model(), prompt(3), **GREEDY)
    assert {len(parts.query) for parts in log} <= {1}  # The trial of the model has one row.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the two ways take; what is measured reads them in turns."""
    seconds = [1.0, 1.0]
    turns = iter(range(10**6))
    monkeypatch.setattr(two_parts, "_LEAST_COLUMNS", NUM_OPEN)
    monkeypatch.setattr(two_parts, "_seconds", lambda *_: seconds[next(turns) % 2])
    return seconds


def pay(tried: TwoParts, parts: Parts, way: Any = whole) -> bool:
    """Asks whether two parts pay for one layer."""
    query, key = parts[:2]
    ways = (lambda: in_two_parts(parts)), (lambda: way(parts))
    return tried.pay(query, key, parts.num_open, *ways)


@pytest.mark.parametrize(("share", "pays"), [(0.5, True), (0.89, True), (0.95, False)])
def test_they_are_used_where_they_are_clearly_faster(clock, share, pays) -> None:
    tried = TwoParts()
    clock[0] = share
    assert pay(tried, asked(torch.float32)) is pays
    clock[0] = math.inf  # Each kind is tried once.
    assert pay(tried, asked(torch.float32)) is pays
    assert pay(tried, asked(torch.float32, num_sharing=1)) is False


def test_a_short_text_is_not_tried() -> None:
    assert pay(TwoParts(), asked(torch.float32), lambda _: pytest.fail("it was run")) is False


def gone(*_: Any) -> Any:
    raise AttributeError("no such operator")


def wrong(query: torch.Tensor, *_: Any) -> Any:
    return torch.zeros_like(query), torch.zeros(query.shape[:-1])


@pytest.mark.parametrize("kernel", [gone, wrong])
def test_a_torch_whose_operators_differ_goes_on_masked(clock, kernel, monkeypatch) -> None:
    clock[0] = 0.1
    monkeypatch.setattr(two_parts, "attention_and_sums", kernel)
    assert pay(TwoParts(), asked(torch.float32)) is False


def test_they_are_tried_under_a_measured_budget_only_and_not_in_a_first_call(monkeypatch) -> None:
    model, forwards = new_model(), Forwards()

    def tries(**knobs: Any) -> bool:
        with forwards.prepare(model, SpecConfig(**knobs)) as found:
            return found.two_parts is not None

    assert not tries()
    forwards.count(model, prepared.TOKENS_THAT_PAY)
    assert tries()
    assert not tries(budget="fixed")
    assert not tries(forward="eager")


def test_calls_use_them(clock, monkeypatch) -> None:
    """From the trial to the text, as users get it."""
    clock[0] = 0.5
    monkeypatch.setattr(two_parts, "_LEAST_COLUMNS", 1)
    monkeypatch.setattr(prepared, "TOKENS_THAT_PAY", 0)
    computed = []
    monkeypatch.setattr(two_parts, "_wait_for", None)
    real = two_parts.attention_and_sums
    monkeypatch.setattr(
        two_parts, "attention_and_sums", lambda *args: computed.append(args) or real(*args)
    )
    model, inputs = tiny_model(), prompt()
    stock = run(model, inputs, **GREEDY)
    spec = doubting(stock.ids, inputs, budget="measured")
    run_both(model, inputs, spec, **GREEDY)
    assert len(computed) > 10
    computed.clear()
    run_both(model, inputs, SelfSpec(forward="eager"), drafts=False, **GREEDY)
    assert not computed

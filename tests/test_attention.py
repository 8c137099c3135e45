"""Heads that share keys are asked together, and get what they would get by themselves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec import SelfSpec, attach
from selfspec import attention as module
from selfspec.attention import grouped_attention
from tests.lossless.same import in_threads
from tests.tiny import make_model

COLUMNS = 23


def inputs(
    num_sharing: int, width: int, *, rows: int = 2, groups: int = 2, dtype: Any = torch.float32
) -> tuple[Any, ...]:
    """A module that says how many heads share, and the tensors of its attention."""
    torch.manual_seed(width)
    query = torch.randn(rows, width, groups * num_sharing, 8).transpose(1, 2)
    key, value = torch.randn(2, rows, groups, COLUMNS, 8)
    hidden = torch.rand(rows, 1, width, COLUMNS) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(dtype).min)
    layer = SimpleNamespace(num_key_value_groups=num_sharing)
    return layer, *(tensor.to(dtype) for tensor in (query, key, value, mask))


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """The queries, keys and masks that were put together."""
    calls = []
    ask = module.scaled_dot_product_attention

    def watch(query: Any, key: Any, value: Any, *, attn_mask: Any, **others: Any) -> torch.Tensor:
        calls.append((query, key, attn_mask))
        return ask(query, key, value, attn_mask=attn_mask, **others)

    monkeypatch.setattr(module, "scaled_dot_product_attention", watch)
    return calls


def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 7, 40])
@pytest.mark.parametrize("num_sharing", [1, 2, 3, 7])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_the_outcome_is_stocks(num_sharing, width, dtype, scaling):
    args = inputs(num_sharing, width, dtype=dtype)
    expected = sdpa_attention_forward(*args, scaling=scaling)[0]
    with grouped_attention():
        found = attend(*args, scaling=scaling)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("width", [1, 4])
def test_keys_are_not_copied(asked, width):
    args = inputs(3, width)
    with grouped_attention():
        attend(*args, dropout=0.0)
    ((query, key, mask),) = asked
    assert key.data_ptr() == args[2].data_ptr()
    assert query.shape == (2, 2, 3 * width, 8)
    assert mask.shape == (2, 1, 3 * width if width > 1 else 1, COLUMNS)


@pytest.mark.parametrize("num_sharing", [1, 3])
def test_without_a_mask_a_query_alone_is_stocks_but_in_half_precision(asked, num_sharing):
    whole, half = (
        (*inputs(num_sharing, 1, dtype=dtype)[:4], None) for dtype in (torch.float32, torch.half)
    )
    with grouped_attention():
        assert torch.equal(attend(*whole), sdpa_attention_forward(*whole)[0])
        assert not asked
        torch.testing.assert_close(attend(*half), sdpa_attention_forward(*half)[0])
    ((query, _, mask),) = asked
    assert query.shape[2] == max(num_sharing, 2)
    assert mask is None


@pytest.mark.parametrize(
    ("change", "others"),
    [
        (lambda mask: None, {}),
        (lambda mask: mask.repeat(1, 6, 1, 1), {}),  # One for each head.
        (lambda mask: mask, {"position_bias": torch.ones(2, 6, 4, COLUMNS)}),
    ],
)
def test_what_is_not_shared_so_is_left_to_stock(asked, change, others):
    *args, mask = inputs(3, 4)
    args.append(change(mask))
    with grouped_attention():
        found = attend(*args, sliding_window=None, **others)
    assert not asked
    assert torch.equal(found, sdpa_attention_forward(*args, **others)[0])


@pytest.mark.parametrize(
    ("num_threads", "num_together"), [(2, 12), (3, 6), (5, 4), (6, 4), (7, 3), (12, 2), (13, 0)]
)
def test_as_many_are_asked_as_one_as_leave_work_for_all(
    asked, monkeypatch, num_threads, num_together
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    args = inputs(12, 2, rows=1)
    with grouped_attention():
        found = attend(*args)
    torch.testing.assert_close(found, sdpa_attention_forward(*args)[0])
    assert [query.shape[2] for query, _, _ in asked] == [2 * num_together] * bool(num_together)
    assert all(key.shape[1] == 24 / num_together for _, key, _ in asked)


def test_outside_in_other_threads_and_behind_an_error_stocks_attention_runs(asked):
    args, seen = inputs(3, 4), []

    def fail_inside() -> None:
        with grouped_attention():
            in_threads(lambda _: seen.append(attend(*args)), 1, 1)
            with grouped_attention():
                pass
            raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        fail_inside()
    seen.append(attend(*args))
    assert not asked
    assert all(torch.equal(found, sdpa_attention_forward(*args)[0]) for found in seen)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_one_mask_serves_all_layers_of_a_forward(asked):
    args = inputs(3, 4)
    wider = inputs(2, 4)[1:4]
    with grouped_attention():
        attend(*args)
        attend(*args)
        attend(SimpleNamespace(num_key_value_groups=2), *wider, args[4])
    first, second, other = (mask for _, _, mask in asked)
    assert first is second
    assert other.shape[2] == 8
    with grouped_attention():
        attend(*args)
    assert asked[-1][2] is not first


def test_what_torch_compiles_attends_as_stock_does(asked):
    args = inputs(3, 4)
    compiled = torch.compile(
        lambda *given: attend(args[0], *given), backend="eager", fullgraph=True
    )
    with grouped_attention():
        found = compiled(*args[1:])
    assert torch.equal(found, sdpa_attention_forward(*args)[0])
    assert not asked


@pytest.fixture
def put_in_place() -> Any:
    """Replaces attention for all models, as somebody else's code does."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    yield partial(ALL_ATTENTION_FUNCTIONS.register, "sdpa")
    ALL_ATTENTION_FUNCTIONS.register("sdpa", before)


def test_somebody_elses_attention_stays_also_if_it_comes_meanwhile(put_in_place):
    def theirs(*args: Any, **kwargs: Any) -> tuple[str, None]:
        return "theirs", None

    with grouped_attention():
        put_in_place(theirs)
    with grouped_attention():
        assert attend(*inputs(3, 4)) == "theirs"
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs


def test_drafts_are_verified_so(asked):
    model = make_model(320).eval()
    prompt = torch.tensor([[5, 6, 7, 8] * 4])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert not asked
    spec = SelfSpec(budget="fixed")
    found = attach(model).generate(prompt, max_new_tokens=20, do_sample=False, assistant=spec)
    assert torch.equal(found, expected)
    assert asked
    assert {key.shape[1] for _, key, _ in asked} == {2}

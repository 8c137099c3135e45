"""The kernel that is called directly gets what it can read, and parts of the keys add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from selfspec.run import grouped_attention, masked_attention
from selfspec.run.masked_attention import mask_for_kernel
from tests.kernel import use_kernel


def inputs(
    rows: int, heads: int, width: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(rows, heads, width, 16, generator=generator).to(dtype)
    slots = torch.randn(2, rows, heads, columns + 64, 16, generator=generator).to(dtype)
    key, value = slots[:, :, :, :columns]  # As captured forwards have them: a part of the slots.
    hidden = torch.rand(rows, 1, width, columns, generator=generator) < 0.5
    hidden[..., columns // 3 :] = True  # Whole parts that nothing is seen of.
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return query, key, value, mask


@pytest.mark.parametrize("columns", [64, 4096])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 12), (2, 5), (3, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_outcome_is_that_of_masked_attention(
    dtype: torch.dtype, rows: int, width: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = use_kernel(monkeypatch)
    query, key, value, mask = inputs(rows, 4, width, columns, dtype)
    given: dict[str, Any] = {"dropout": 0.0, "scale": 0.3}
    found = masked_attention.masked_attention(query, key, value, mask_for_kernel(mask), **given)
    exact = scaled_dot_product_attention(
        *(x.double() for x in (query, key, value)), attn_mask=mask.double(), scale=0.3
    )
    assert found.dtype == dtype
    limit = 1e-5 if dtype is torch.float32 else 0.02
    assert (found - exact).norm() <= limit * exact.norm()
    assert parts == ([8] * rows if columns == 4096 and rows < 3 else [1])


@pytest.mark.parametrize(
    ("width", "columns", "number"),
    [(1, 4096, 8), (1, 1024, 1), (64, 8192, 16), (640, 8192, 1), (1, 4100, 1), (1, 65536, 16)],
)
def test_keys_are_cut_where_a_card_would_be_idle(
    width: int, columns: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernel(monkeypatch)
    query = torch.empty(1, 8, width, 16)
    assert masked_attention._num_parts(query, columns) == number


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("columns", [64, 65])
def test_a_mask_begins_where_the_kernel_can_read(
    columns: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the rows of a draft model's mask from one node on."""
    use_kernel(monkeypatch)
    mask = pad(torch.randn(2, 1, 5, columns), (first, 0))[:, :, 1:, first:]
    aligned = mask_for_kernel(mask)
    assert torch.equal(aligned, mask)
    assert aligned.data_ptr() % 16 == 0
    assert all(stride % 8 == 0 for stride in aligned.stride()[:-1])


def test_what_the_kernel_has_no_place_for_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = use_kernel(monkeypatch)
    query, key, value, mask = inputs(1, 4, 3, 64, torch.float32)
    for given in ((query.double(), key.double(), value.double()), (query, key, value[..., :5])):
        masked_attention.masked_attention(*given, mask.to(given[0].dtype), dropout=0.0, scale=None)
    assert not parts
    assert grouped_attention.masked_attention is masked_attention.masked_attention


def test_masks_of_truths_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a model makes itself for a chain."""
    parts = use_kernel(monkeypatch)
    query, key, value, mask = inputs(1, 4, 3, 64, torch.float32)
    sees = mask_for_kernel(mask == 0)
    found = masked_attention.masked_attention(query, key, value, sees, dropout=0.0, scale=None)
    assert torch.equal(found, scaled_dot_product_attention(query, key, value, attn_mask=mask == 0))
    assert not parts

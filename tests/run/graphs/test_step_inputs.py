"""Masks that a device builds from packed inputs equal those that the CPU lays out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.run.graphs.step_inputs import (
    InputShape,
    InputWriter,
    StaticForward,
    StepState,
    static_layout,
)
from selfspec.run.layout import Window
from tests.run.test_layout import Batch, batches, laid_out, mask_of, windows
from tests.strategies import tree_of

NUM_KEYS = 40


def visible_of(batch: Batch, num_rows: int) -> torch.Tensor:
    """Room behind the prompt, where every column counts, and rows that are not used."""
    visible = torch.ones(num_rows, batch.prompt_length + 3, dtype=torch.bool)
    known = batch.visible()
    if known is not None:
        visible[: len(known), : batch.prompt_length] = known
    return visible


def written(
    batch: Batch, shape: InputShape, writer: InputWriter, first_column: int
) -> torch.Tensor:
    starts = [min(set(range(batch.prompt_length)) - hidden) for hidden in batch.hidden]
    positions = np.broadcast_to(np.array(batch.lengths), (*shape.lead, len(batch.lengths)))
    state = StepState(batch.lengths, positions, starts, [first_column], batch.front)
    return writer.write(batch.trees, state).clone()


def static(
    batch: Batch,
    window: Window,
    shape: InputShape,
    first_column: int = 0,
    writer: InputWriter | None = None,
    dtype: torch.dtype = torch.float32,
) -> StaticForward:
    return static_layout(
        written(batch, shape, writer or InputWriter(shape), first_column),
        shape,
        windows={"type": window},
        num_keys={"type": NUM_KEYS},
        visible=visible_of(batch, shape.rows),
        dtype=dtype,
    )


@settings(max_examples=80)
@given(batches(), windows, st.data())
def test_masks_equal_those_of_the_layout(batch: Batch, window: Window, data: st.DataObject) -> None:
    first_column = 0
    if window.kind != "full":
        last_seen = min(batch.lengths) - window.size + 1
        first_column = data.draw(st.integers(0, max(last_seen, 0)))
    num_rows, width = len(batch.trees), max(map(len, batch.trees))
    shape = InputShape(
        num_rows + data.draw(st.integers(0, 2)), width + data.draw(st.integers(0, 4)), (), 1
    )
    forward = static(batch, window, shape, first_column)
    mask, true_mask = forward.layout.masks["type"], mask_of(batch, window, first_column)
    num_columns = batch.front - first_column + width
    assert torch.equal(mask[:num_rows, :, :width, :num_columns], true_mask)
    lowest = torch.finfo(torch.float32).min
    assert bool((mask[..., batch.front - first_column + shape.width :] == lowest).all())
    assert bool((mask[:num_rows, :, :width, num_columns:] == lowest).all())
    # Surplus nodes see what a root sees, and no other node sees them.
    assert bool((mask == 0).any(-1).all())
    root = mask[:num_rows, :, :1]
    assert torch.equal(mask[:num_rows, :, width:], root.expand(-1, -1, shape.width - width, -1))


@settings(max_examples=60)
@given(batches(), st.integers(0, 4), st.sampled_from([(), (3,), (2, 2)]))
def test_ids_and_positions_equal_those_of_the_layout(
    batch: Batch, more: int, lead: tuple[int, ...]
) -> None:
    width = max(map(len, batch.trees))
    forward = static(batch, Window(), InputShape(len(batch.trees), width + more, lead, 1))
    true = laid_out(batch, Window())
    assert torch.equal(forward.layout.input_ids[:, :width], true.input_ids)
    assert bool((forward.layout.input_ids[:, width:] == true.input_ids[:, :1]).all())
    positions = forward.layout.position_ids
    assert positions.shape == (*lead, len(batch.trees), width + more)
    assert torch.equal(
        positions[..., :width], true.position_ids.expand(*lead, *true.position_ids.shape)
    )


@settings(max_examples=60)
@given(batches(), batches(), windows)
def test_a_writer_keeps_nothing_of_the_step_before(
    first: Batch, second: Batch, window: Window
) -> None:
    shape = InputShape(3, 8, (), 1)
    writer = InputWriter(shape)
    static(first, window, shape, writer=writer)
    again = static(second, window, shape, writer=writer)
    fresh = static(second, window, shape)
    num_rows = len(second.trees)
    assert torch.equal(again.layout.masks["type"], fresh.layout.masks["type"])
    for name in ("input_ids", "position_ids"):
        got, true = getattr(again.layout, name), getattr(fresh.layout, name)
        assert torch.equal(got[:num_rows], true[:num_rows])


@pytest.mark.parametrize("width", [1, 63, 64, 65, 127, 128, 130])
def test_trees_of_more_nodes_than_a_word_has_bits(width: int) -> None:
    """A chain, each node of which sees all those above it."""
    batch = Batch([tree_of([-1, *range(width - 1)])], [4], [set()], 4)
    shape = InputShape(1, width, (), 1)
    forward = static_layout(
        written(batch, shape, InputWriter(shape), 0),
        shape,
        windows={"type": Window()},
        num_keys={"type": 256},
        visible=visible_of(batch, 1),
        dtype=torch.float32,
    )
    sees = forward.layout.masks["type"][0, 0] == 0
    assert torch.equal(sees[:, 4 : 4 + width], torch.ones(width, width).tril().bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_have_the_keys_dtype(dtype: torch.dtype) -> None:
    batch = Batch([tree_of([-1, 0, 0])], [4], [set()], 4)
    mask = static(batch, Window(), InputShape(1, 4, (), 1), dtype=dtype).layout.masks["type"]
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


def test_nodes_go_behind_the_front() -> None:
    batch = Batch([tree_of([-1, 0, 0])], [9], [set()], 4)
    forward = static(batch, Window("sliding", 3), InputShape(1, 4, (), 1), first_column=5)
    assert forward.slots["type"].tolist() == [4, 5, 6, 7]
    assert int(forward.front) == 9

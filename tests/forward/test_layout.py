"""Masks equal an ancestor walk, whatever the windows, the padding and the rows' lengths."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.forward.columns import KVRow
from selfspec.forward.layout import (
    InputShape,
    Layout,
    TreePlacement,
    Window,
    hiding,
    pack_inputs,
    unpack_inputs,
)
from selfspec.records import DraftTree
from tests.oracles import MaskOracle
from tests.strategies import tree_of, trees

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Batch(NamedTuple):
    """Rows of a forward, as plain lists."""

    trees: list[DraftTree]
    lengths: list[int]
    hidden: list[set[int]]  # columns of the prompt that don't count, by row
    prompt_length: int

    @property
    def tree_start(self) -> int:
        return max(self.lengths)

    def visible(self) -> torch.Tensor | None:
        """(B, P), None where nothing is padded."""
        if not any(self.hidden):
            return None
        columns = range(self.prompt_length)
        return torch.tensor([[column not in row for column in columns] for row in self.hidden])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Prompts of one width, with tokens committed behind them at each row's pace.

    Mostly padded on the left; but a mask may hide any columns, as long as one is left.
    """
    num_rows = draw(st.integers(1, 3))
    prompt_length = draw(st.integers(1, 6))
    left = st.integers(0, prompt_length - 1).map(lambda n: set(range(n)))
    anywhere = st.sets(st.integers(0, prompt_length - 1), max_size=prompt_length - 1)
    return Batch(
        [draw(trees(max_nodes=6)) for _ in range(num_rows)],
        [prompt_length + draw(st.integers(0, 6)) for _ in range(num_rows)],
        [draw(st.one_of(left, anywhere)) for _ in range(num_rows)],
        prompt_length,
    )


windows = st.one_of(
    st.just(Window()),
    st.builds(Window, st.just("sliding"), st.integers(1, 9)),
    st.builds(Window, st.just("chunked"), st.integers(1, 9)),
)


def first_columns(batch: Batch, window: Window) -> st.SearchStrategy[int]:
    """What lies before it, nobody can see any more."""
    last_seen = 0 if window.form == "full" else min(batch.lengths) - window.size + 1
    return st.integers(0, max(last_seen, 0))


def laid_out(
    batch: Batch,
    windows: dict[str, Window] | Window = Window(),  # noqa: B008
    firsts: Any = 0,
    *,
    positions: Any = None,
    more: tuple[int, int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Layout:
    """What a forward gets; `more` are surplus rows, nodes and keys, as a captured forward has."""
    if isinstance(windows, Window):
        windows, firsts = {"type": windows}, [firsts]
    width = max(map(len, batch.trees))
    starts = [min(set(range(batch.prompt_length)) - hidden) for hidden in batch.hidden]
    positions = np.array(batch.lengths if positions is None else positions)
    rows_of = [
        KVRow(num_columns=length, start=start, position=positions[..., number])
        for number, (length, start) in enumerate(zip(batch.lengths, starts, strict=True))
    ]
    forward = TreePlacement(rows_of, batch.tree_start, dict(zip(windows, firsts, strict=True)))
    known = batch.visible()
    rows, nodes, keys = more or (0, 0, 0)
    shape = InputShape(len(batch.trees) + rows, width + nodes, positions.shape[:-1], len(windows))
    if known is not None:  # Behind the prompt every column counts, and so do surplus rows.
        known = torch.nn.functional.pad(known, (0, 1 + keys, 0, rows), value=True)
    shown: Any = windows
    if more is None:
        shown = hiding(windows, forward, width, has_padding=known is not None)
    num_keys = [batch.tree_start - first + shape.width + keys for first in firsts]
    return unpack_inputs(
        pack_inputs(batch.trees, forward, shape),
        shape,
        windows=shown,
        num_keys=dict(zip(windows, num_keys, strict=True)),
        visible=known,
        dtype=dtype,
    )


def mask_of(batch: Batch, window: Window, first_column: int = 0) -> torch.Tensor:
    """(B, 1, Q, columns), also where there is none, as nothing is hidden."""
    mask = laid_out(batch, window, first_column).masks["type"]
    width = max(map(len, batch.trees))
    shape = (len(batch.trees), 1, width, batch.tree_start - first_column + width)
    return torch.zeros(shape) if mask is None else mask


def seen_by_walking(batch: Batch, window: Window, first_column: int) -> list[list[list[bool]]]:
    """The mask of every row, asked cell by cell."""
    width = max(map(len, batch.trees))
    rows = []
    for tree, length, hidden in zip(batch.trees, batch.lengths, batch.hidden, strict=True):
        walk = MaskOracle(tree.parents, length, hidden, *window)
        rows.append(
            [
                [walk.sees_column(node, c) for c in range(first_column, batch.tree_start)]
                + [walk.sees_node(node, other) for other in range(width)]
                for node in range(width)
            ]
        )
    return rows


@settings(max_examples=80)
@given(batches(), windows, st.data())
def test_masks_equal_an_ancestor_walk(batch, window, data):
    first_column = data.draw(first_columns(batch, window))
    mask = mask_of(batch, window, first_column)
    sees = mask == 0
    assert sees[:, 0].tolist() == seen_by_walking(batch, window, first_column)
    assert bool((mask[~sees] == torch.finfo(torch.float32).min).all())


@given(batches())
def test_ids_and_positions_are_the_trees_own(batch):
    layout = laid_out(batch)
    width = max(map(len, batch.trees))
    for row, tree in enumerate(batch.trees):
        fill = width - len(tree)
        assert layout.input_ids[row].tolist() == tree.tokens + tree.tokens[:1] * fill
        depths = tree.depths + [0] * fill
        assert layout.position_ids[row].tolist() == [batch.lengths[row] + d for d in depths]


@settings(max_examples=80)
@given(batches(), windows, st.tuples(*[st.integers(0, 4)] * 3), st.data())
def test_surplus_rows_nodes_and_keys_change_nothing(batch, window, more, data):
    first_column = data.draw(first_columns(batch, window))
    rows, width = len(batch.trees), max(map(len, batch.trees))
    layout = laid_out(batch, window, first_column, more=more)
    mask, exact = layout.masks["type"], laid_out(batch, window, first_column)
    tree_begins = batch.tree_start - first_column
    true_mask = mask_of(batch, window, first_column)
    assert torch.equal(mask[:rows, :, :width, : tree_begins + width], true_mask)
    lowest = torch.finfo(torch.float32).min
    assert bool((mask[:rows, :, :width, tree_begins + width :] == lowest).all())
    # Surplus nodes see what a root sees, and no other node sees them.
    assert bool((mask == 0).any(-1).all())
    root = mask[:rows, :, :1]
    assert torch.equal(mask[:rows, :, width:], root.expand(-1, -1, more[1], -1))
    assert torch.equal(layout.input_ids[:rows, :width], exact.input_ids)
    assert torch.equal(layout.position_ids[:rows, :width], exact.position_ids)
    assert layout.slots["type"].tolist() == [tree_begins + n for n in range(width + more[1])]
    assert int(layout.tree_start) == batch.tree_start


def test_positions_of_several_axes():
    """Multi-axis rotary models count (3, B, Q) positions; a tree moves all axes alike."""
    batch = Batch([tree_of([-1, 0, 0, 2]), tree_of([-1, 0])], [7, 5], [set(), set()], 5)
    positions = np.array([[7, 5], [3, 2], [9, 4]])
    for more in (None, (0, 0, 0), (2, 3, 0)):
        layout = laid_out(batch, positions=positions, more=more)
        found = layout.position_ids[:, :2, :4]
        assert found[:, 0].tolist() == [[7, 8, 8, 9], [3, 4, 4, 5], [9, 10, 10, 11]]
        assert found[:, 1].tolist() == [[5, 6, 5, 5], [2, 3, 2, 2], [4, 5, 4, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_additive_in_the_models_dtype(dtype):
    """A boolean mask would be silently wrong under eager attention."""
    batch = Batch([tree_of([-1, 0, 0])], [2], [set()], 2)
    mask = laid_out(batch, dtype=dtype).masks["type"]
    assert mask.dtype == dtype
    assert mask.shape == (1, 1, 3, 5)
    low = torch.finfo(dtype).min
    assert mask[0, 0].tolist() == [[0, 0, 0, low, low], [0, 0, 0, 0, low], [0, 0, 0, low, 0]]


@pytest.mark.parametrize(
    ("window", "nodes", "lengths", "hidden", "is_there"),
    [
        (Window(), 1, [9, 9], [set(), set()], False),
        (Window("sliding", 10), 1, [9, 9], [set(), set()], False),
        (Window("sliding", 9), 1, [9, 9], [set(), set()], True),
        (Window("chunked", 64), 1, [9, 9], [set(), set()], True),  # stock makes one, too
        (Window(), 1, [9, 8], [set(), set()], True),
        (Window(), 1, [9, 9], [set(), {0}], True),
        (Window(), 2, [9, 9], [set(), set()], True),
    ],
)
def test_a_mask_is_there_where_something_is_hidden(window, nodes, lengths, hidden, is_there):
    trees = [tree_of([-1, *[0] * (nodes - 1)])] * 2
    batch = Batch(trees, lengths, hidden, min(lengths))
    assert (laid_out(batch, window).masks["type"] is not None) == is_there


def test_each_attention_type_has_a_mask_of_its_own_width():
    batch = Batch([tree_of([-1, 0])], [9], [set()], 9)
    layout = laid_out(batch, {"full": Window(), "near": Window("sliding", 3)}, [0, 7])
    assert layout.masks["full"].shape == (1, 1, 2, 11)
    assert (layout.masks["near"][0, 0] == 0).tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]

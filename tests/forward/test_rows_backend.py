"""`TreeKV` with rows that come and go, against plain lists of which token lies in which column."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DynamicCache

from selfspec.forward.sizes import Limits, Policy
from tests.forward.test_tree_kv import HeldKV, new_kv, scarce, states, write


def add_row(kv: HeldKV, stamps: list[int], max_columns: int) -> None:
    """Windows of these rows keep all columns all the same."""
    cache = DynamicCache()
    write(cache, [stamps])
    kv.admit(cache, most=max_columns)


def rows_kv(max_rows: int, max_tokens: int | None) -> HeldKV:
    return new_kv(4, Policy(Limits(max_rows, max_tokens)))


def all_max_columns(kv: HeldKV) -> list[int]:
    return [row.max_columns for row in kv.rows]


def assert_holds(kv: HeldKV, texts: list[list[int]]) -> None:
    """What each row shows in front of the next tree; behind its end nothing is NaN."""
    if not texts:
        return
    kv.reserve(kv.rows, 1)
    for layer, shown in enumerate(write(kv.cache, [[7] for _ in texts])):
        for row, text in enumerate(texts):
            for got, true in zip(shown, states(layer, [text]), strict=True):
                assert not got.isnan().any()
                assert torch.equal(got[row, :, : len(text)], true[0])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_tokens", [None, 300])
def test_rows_keep_what_is_theirs(max_tokens: int | None, seed: int) -> None:
    dice = random.Random(seed)
    kv, limits = rows_kv(4, max_tokens), Limits(4, max_tokens)
    texts: list[list[int]] = []
    stamps = iter(range(1, 10**6))
    for _ in range(30):
        length = dice.randrange(1, 40)
        max_columns = length + dice.randrange(20, 60)
        if dice.random() < 0.5 and limits.fits([*all_max_columns(kv), max_columns]):
            texts.append([next(stamps) for _ in range(length)])
            add_row(kv, texts[-1], max_columns)
        elif texts and dice.random() < 0.4:
            left = dice.randrange(len(texts))
            order = [i for i in range(len(texts)) if i != left]
            if left < len(order):  # The last row moves into the gap.
                order = order[:left] + order[-1:] + order[left:-1]
            kv.keep(order)
            texts = [texts[i] for i in order]
        elif texts and max(kv.lengths) + 3 <= min(all_max_columns(kv)):
            width = dice.randrange(1, 4)
            kv.reserve(kv.rows, width)
            trees = [[next(stamps) for _ in range(width)] for _ in texts]
            write(kv.cache, trees)
            paths = [[0, *sorted(dice.sample(range(1, width), width // 2))] for _ in texts]
            kv.commit(paths)
            for text, tree, path in zip(texts, trees, paths, strict=True):
                text += [tree[node] for node in path]
        assert kv.lengths == [len(text) for text in texts]
        assert max_tokens is None or kv.nbytes <= max_tokens * kv.column_bytes
        assert_holds(kv, texts)


def test_what_an_earlier_row_left_is_wiped_out() -> None:
    """A model may say NaN, and 0 times NaN is NaN."""
    kv = rows_kv(2, 40)
    ill = DynamicCache()
    write(ill, [[1, 2, 3, 4]])
    for layer in ill.layers:
        layer.keys.fill_(float("nan"))
    kv.admit(ill, most=20)
    kv.keep([])
    add_row(kv, [5], 20)
    add_row(kv, [6, 7, 8, 9], 20)
    assert_holds(kv, [[5], [6, 7, 8, 9]])


def test_without_a_limit_it_takes_what_the_texts_need() -> None:
    """And not what they may come to need, times the rows that may come."""
    kv = rows_kv(64, None)
    max_columns, texts = 100_000, [[1, 2, 3]]
    add_row(kv, texts[0], max_columns)
    assert kv.nbytes <= 64 * kv.column_bytes
    for stamp in range(4, 1000):
        kv.reserve(kv.rows, 1)
        write(kv.cache, [[stamp]])
        kv.commit([[0]])
        texts[0].append(stamp)
        assert kv.nbytes <= 2 * (stamp + 64) * kv.column_bytes
    texts.append([5])
    add_row(kv, texts[1], max_columns)
    assert kv.nbytes <= 2 * 2 * (1000 + 64) * kv.column_bytes
    assert_holds(kv, texts)


def test_running_out_of_memory_for_a_row_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = rows_kv(4, None)
    add_row(kv, [3, 4], 90)
    scarce(monkeypatch, num_before=1)
    with pytest.raises(torch.OutOfMemoryError):
        add_row(kv, [5, 6, 7], 90)
    monkeypatch.undo()
    assert_holds(kv, [[3, 4]])
    add_row(kv, [5, 6, 7], 90)
    assert_holds(kv, [[3, 4], [5, 6, 7]])

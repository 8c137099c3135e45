"""What was measured of products is kept, found again, and belongs to what it was measured on."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from selfspec import products
from selfspec.book import Book
from selfspec.plugin import turns
from selfspec.plugin.turns import Turns
from selfspec.products import LINEAR, NUM_TOKENS, PACKED, TURNED, Product, products_of

NUM = len(NUM_TOKENS)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups each measurement was given; small products count, some pay turned."""
    numbers: list[int] = []

    def measure(groups: Any, *, max_seconds: float, settled: bool) -> dict[str, tuple[float, ...]]:
        numbers.append(len(groups))
        share = 0.5 if groups[0][0].in_features == 8 else 1.0
        return {LINEAR: (1.0,) * NUM, TURNED: (share,) * NUM, PACKED: (share / 2,) * NUM}

    monkeypatch.setattr(products, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(turns, "seconds_by_way", measure)
    return numbers


def model_of(*sizes: tuple[int, int]) -> nn.Module:
    return nn.ModuleList([nn.Linear(*size) for size in sizes])


def test_only_what_pays_is_in_the_table(tmp_path: Path, measured: list[int]) -> None:
    known = Turns(Book("products", tmp_path))
    model = model_of((8, 4), (8, 4), (4, 8))
    product = Product((4,), 8, torch.float32)
    assert known.table(products_of(model), (TURNED,)) == {product: (TURNED,) * NUM}
    assert sorted(measured) == [1, 2]
    both = known.table(products_of(model), (TURNED, PACKED))
    assert both == {product: (PACKED,) * NUM, Product((8,), 4, torch.float32): (PACKED,) * NUM}
    assert known.table(products_of(model_of((4, 8))), (TURNED,)) == {}
    assert known.table(products_of(nn.ReLU()), (TURNED,)) == {}
    assert len(measured) == 2


def test_it_is_found_again_without_measuring(tmp_path: Path, measured: list[int]) -> None:
    table = Turns(Book("products", tmp_path)).table(products_of(model_of((8, 4))), (TURNED,))
    assert (
        Turns(Book("products", tmp_path)).table(products_of(model_of((8, 4))), (TURNED,)) == table
    )
    assert len(measured) == 1


def test_another_dtype_or_number_of_threads_is_another_thing(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Turns(Book("products", tmp_path))
    known.table(products_of(model_of((8, 4))), (TURNED,))
    known.table(products_of(model_of((8, 4)).to(torch.bfloat16)), (TURNED,))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    known.table(products_of(model_of((8, 4))), (TURNED,))
    assert len(measured) == 3


def test_those_of_one_input_are_another_product(tmp_path: Path, measured: list[int]) -> None:
    one, other = nn.Linear(8, 4), nn.Linear(8, 6)
    apart, together = (
        nn.ModuleList([one, other]),
        nn.ModuleDict({"gate_proj": one, "up_proj": other}),
    )
    known = Turns(Book("products", tmp_path))
    known.table(products_of(apart), (TURNED,))
    assert len(known.table(products_of(together), (TURNED,))) == 1
    assert len(measured) == 3
    assert len(list(tmp_path.iterdir())) == 3


NONE_OF_OURS = [
    None,
    3,
    [1, 2],  # as it was kept before there were packed weights
    {},
    {TURNED: [1.0] * NUM},
    {LINEAR: [1.0]},
    {LINEAR: ["1"] * NUM},
    {LINEAR: [1.0] * NUM, PACKED: 3},
]


@pytest.mark.parametrize("kept", NONE_OF_OURS, ids=str)
def test_what_is_no_table_of_seconds_is_measured_again(
    kept: object, tmp_path: Path, measured: list[int]
) -> None:
    Turns(Book("products", tmp_path)).table(products_of(model_of((8, 4))), (TURNED,))
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "values": kept}))
    assert Turns(Book("products", tmp_path)).table(products_of(model_of((8, 4))), (TURNED,)) != {}
    assert len(measured) == 2


def test_several_threads_measure_once(tmp_path: Path, measured: list[int]) -> None:
    known, found = Turns(Book("products", tmp_path)), products_of(model_of((8, 4)))
    threads = [threading.Thread(target=known.table, args=(found, (TURNED,))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 1

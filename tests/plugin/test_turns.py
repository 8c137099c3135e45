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
from selfspec.products import Product


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many modules each measurement was given; small products count, and pay for 1 and 2."""
    numbers: list[int] = []

    def measure(modules: Any, *, max_seconds: float) -> tuple[int, ...]:
        numbers.append(len(modules))
        return (1, 2) if modules[0].in_features == 8 else ()

    monkeypatch.setattr(products, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(turns, "faster_turned", measure)
    return numbers


def model_of(*sizes: tuple[int, int]) -> nn.Module:
    return nn.ModuleList([nn.Linear(*size) for size in sizes])


def test_only_what_pays_is_in_the_table(tmp_path: Path, measured: list[int]) -> None:
    known = Turns(Book("products", tmp_path))
    model = model_of((8, 4), (8, 4), (4, 8))
    assert known.table(model) == {Product(4, 8, torch.float32): (1, 2)}
    assert sorted(measured) == [1, 2]
    assert known.table(model_of((4, 8))) == {}
    assert known.table(nn.ReLU()) == {}
    assert len(measured) == 2


def test_it_is_found_again_without_measuring(tmp_path: Path, measured: list[int]) -> None:
    table = Turns(Book("products", tmp_path)).table(model_of((8, 4)))
    assert Turns(Book("products", tmp_path)).table(model_of((8, 4))) == table
    assert len(measured) == 1


def test_another_dtype_or_number_of_threads_is_another_thing(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Turns(Book("products", tmp_path))
    known.table(model_of((8, 4)))
    known.table(model_of((8, 4)).to(torch.bfloat16))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    known.table(model_of((8, 4)))
    assert len(measured) == 3


@pytest.mark.parametrize("kept", [None, 3, "12", {}, [5], [1, "2"], [[1]]], ids=str)
def test_what_is_no_list_of_numbers_is_measured_again(
    kept: object, tmp_path: Path, measured: list[int]
) -> None:
    Turns(Book("products", tmp_path)).table(model_of((8, 4)))
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "values": kept}))
    assert Turns(Book("products", tmp_path)).table(model_of((8, 4))) != {}
    assert len(measured) == 2


def test_several_threads_measure_once(tmp_path: Path, measured: list[int]) -> None:
    known, model = Turns(Book("products", tmp_path)), model_of((8, 4))
    threads = [threading.Thread(target=known.table, args=(model,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 1

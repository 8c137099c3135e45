"""The KV's bytes: counted as they are, and no more of them than the text and the tree need."""

from __future__ import annotations

import pytest
import torch

from eval.kv_memory import compare, watched
from eval.methods.storages import StorageLog
from tests.fakes import new_model, prompt

COLUMN = 2 * 2 * 8 * 4  # one layer's keys and values, 2 heads of 8 fp32 numbers


@pytest.fixture(scope="module")
def model():
    return new_model(num_hidden_layers=1)


def test_storages_are_counted_once_and_while_they_live():
    old = torch.zeros(100)
    with StorageLog() as log:
        outside = old.view(10, 10)
        first = torch.zeros(25)
        view = first[3:]
        number = log.number(view)
        del first
        second = torch.cat([view, view])
        del view
        third = torch.zeros(1)
    assert log.number(outside) == 0
    assert (number, log.number(second), log.number(third)) == (1, 2, 3)
    assert log.peak({1}) == 100
    assert log.peak({2, 3}) == 4 * (44 + 1)
    assert log.peak() == 100 + 176
    assert log.peak(set()) == 0


def test_stock_is_counted_to_the_byte(model):
    inputs = prompt(length=20)

    def generate():
        model.generate(**inputs, max_new_tokens=10, do_sample=False)

    memory = watched(model, generate)
    assert memory.column == COLUMN
    assert memory.held == (20 + 9) * COLUMN  # the last token's KV is never made
    # keys or values are there in both lengths for a moment
    assert memory.peak == memory.held + 28 * COLUMN // 2
    assert memory.everything >= memory.peak
    assert memory.cuda is None
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "width"),
    [
        (200, 40, 16),
        (100, 100, 64),
        (17, 120, 16),
        pytest.param(17, 300, 16, marks=pytest.mark.slow),
    ],
)
def test_ours_holds_no_more_than_stock_and_a_tree(model, num_prompt, num_new, width):
    found = compare(model, num_prompt, num_new, max_nodes=width)
    assert found.stock.held == (num_prompt + num_new - 1) * COLUMN
    assert found.ours.held >= found.stock.held
    assert found.allowed == 1.1 * found.stock.held + width * COLUMN
    assert found.ours.held <= found.allowed


@pytest.mark.slow
def test_the_peak_is_near_what_is_held(monkeypatch):
    """As where the KV is large: it moves into the slots part by part."""
    monkeypatch.setattr("selfspec.run.slots._SMALL", 1)
    found = compare(new_model(num_hidden_layers=8), 200, 40, max_nodes=16)
    assert found.ours.held <= found.allowed
    assert found.ours.peak <= 1.1 * found.stock.peak + 16 * 8 * COLUMN


def test_the_command(figures, chat_folder):
    options = ["--prompt-tokens", "20", "30", "--new-tokens", "5", "--max-nodes", "4"]
    rows = figures("kv_memory", "--model", chat_folder, *options, "--dtype", "bfloat16")["rows"]
    assert [(row["num_prompt_tokens"], row["width"]) for row in rows] == [(20, 4), (30, 4)]
    assert all(row["is_allowed"] for row in rows)

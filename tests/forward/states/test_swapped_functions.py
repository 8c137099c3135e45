"""What stands for functions of transformers works on our states, and leaves all else alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec import SelfSpec
from selfspec.compat.generation import KV
from selfspec.compat.states import state_functions, states_by_place
from selfspec.forward.states.rules import Ancestry
from selfspec.forward.states.slots import States
from selfspec.forward.states.swapped_functions import branching
from tests.fakes import prompt, tiny_model
from tests.lossless.same import GREEDY, attached, in_threads, run
from tests.lossless.test_same_predictions import ALONE

TREE = Ancestry(torch.zeros(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long))


def names_of(model: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for module, name in state_functions(model.modules())}


def read(model: Any) -> tuple[torch.Tensor, Any]:
    kv = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompt(), use_cache=True, **{KV: kv})
        logits = model(input_ids=prompt(1, 3)["input_ids"], use_cache=True, **{KV: kv}).logits
    return logits, kv


@pytest.mark.parametrize("name", ["qwen3-5", "falcon-h1", "kimi-linear", "lfm2"])
def test_stock_forwards_are_as_before_inside(name: str) -> None:
    """Those of another cache in this thread, and those of another thread."""
    model, found = tiny_model(name), []
    logits, kv = read(model)
    stock, functions = names_of(model), state_functions(model.modules())
    with branching(States(), TREE, functions):
        assert names_of(model).items().isdisjoint(stock.items())
        found.append(read(model))
        thread = threading.Thread(target=lambda: found.append(read(model)))
        thread.start()
        thread.join()
        with branching(States(), TREE, functions):
            found.append(read(model))
    assert names_of(model) == stock
    for other, other_kv in found:
        assert torch.equal(other, logits)
        ours = states_by_place(other_kv.layers)
        assert all(torch.equal(ours[at], s) for at, s in states_by_place(kv.layers).items())


@pytest.mark.parametrize("name", ["qwen3-5", "falcon-h1"])
def test_states_are_exact_under_autocast(name: str) -> None:
    """As in plain steps, whose states autocast leaves alone."""
    model = tiny_model(name)
    spec = SelfSpec(**ALONE)
    with torch.autocast("cpu", torch.bfloat16):
        run(model, prompt(), custom_generate=spec, prediction=[5, 6, 7, 8] * 6, **GREEDY)
    assert spec.stats.mode == "tree", spec.stats.disabled_reason


def test_threads_share_a_model() -> None:
    """Each has states of its own, and one of them decodes without drafts."""
    model, calls = tiny_model("qwen3-5"), [(prompt(1, 9, seed=seed), seed) for seed in range(3)]
    stock = [run(model, inputs, seed=seed, **GREEDY).ids for inputs, seed in calls]
    found = dict[int, Any]()

    def decode(number: int) -> None:
        inputs, seed = calls[number]
        more: dict[str, Any] = {}
        if number:
            answer = stock[number][0, 9:].tolist()
            more = {"custom_generate": SelfSpec(**ALONE), "prediction": answer[:3] + answer}
        for _ in range(4):
            found[number] = run(model, inputs, seed=seed, **more, **GREEDY).ids

    with attached(model):
        in_threads(decode, 3, 3)
    assert all(torch.equal(found[number], ids) for number, ids in enumerate(stock))
